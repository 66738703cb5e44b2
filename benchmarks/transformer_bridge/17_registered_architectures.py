"""boot_transformers refuses an architecture whose adapter is registered, or declared as an entry point."""

from transformer_lens.factories.architecture_adapter_factory import ArchitectureAdapterFactory
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.supported_architectures.bert import BertArchitectureAdapter
from transformers import DistilBertConfig, DistilBertForMaskedLM

ArchitectureAdapterFactory.register_adapter("TinyForMaskedLM", BertArchitectureAdapter)
hf = DistilBertForMaskedLM(DistilBertConfig(vocab_size=50, dim=24, hidden_dim=48, n_layers=2, n_heads=4))
hf.config.architectures = ["TinyForMaskedLM"]
try:
    TransformerBridge.boot_transformers("tiny", hf_model=hf)
    seen = "a Bridge"
except Exception as error:
    seen = f"{type(error).__name__}: {str(error)[:48]} …"
print("the adapter of TinyForMaskedLM is registered, so a Bridge with it is expected")
print(f"boot_transformers: {seen}")
assert "Could not determine supported architecture" in seen
