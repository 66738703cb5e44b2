"""Interrupt a call by signals at many moments, and check the model and the call's result afterwards.

    python -m tests._care.interrupts 1000 "bridge gpt2,bridge llama" run pruned

This command interrupts 1000 times in each of three ways. `tests/_care/test_interrupts.py` runs it in a
separate process, because a signal may come after the call, and because the tests' shape checks wrap every
function.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

import lens_mix as lm
from lens_mix._algebra.sketch import random_vectors
from lens_mix._care.state import all_modules
from lens_mix._verification import kept
from lens_mix.experiments import pruned, pruning_curves
from lens_mix.traces.removals import Passes
from tests import tiny_models
from tests.matrix import case_of

LABELS = ("bridge gpt2", "bridge llama", "HookedTransformer LN")
Call = Callable[[Any, torch.Tensor], Any]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGHUP)


class Came(RuntimeError):
    """The exception of every handler. It is an error that models raise too, as in a test's timeout."""


def raise_came(number: int, frame: FrameType | None) -> None:
    """Raise an exception. This is a signal handler."""
    raise Came(signal.Signals(number).name)


def _pruned(model: Any, tokens: torch.Tensor) -> Any:
    with pruned(model, [(0, 1), (1, 0)]):
        return model(tokens)


def _pruning_curves(model: Any, tokens: torch.Tensor) -> Any:
    def metric(model: Any) -> float:
        return model(tokens)[:, -1].log_softmax(-1)[:, 5].mean().item()

    return pruning_curves(model, metric, {}, fractions=[0, 0.5], random=1)


def _attention_attribution(model: Any, tokens: torch.Tensor) -> Any:
    return lm.run(model, tokens, lm.methods.AttentionAttribution(n_steps=4))


def _first_run(model: Any, tokens: torch.Tensor) -> Any:
    """Return a run that verifies the model, which finds the kind of each module by trying it."""
    kept._verifications.clear()
    random_vectors.cache_clear()
    lm.run(model, tokens, ["attention", "value_zeroing"])


def _trace(model: Any, tokens: torch.Tensor) -> Any:
    t = lm.trace(model, tokens[0, :4], answer=tokens[0, 4:], sources="token")
    # A HookedTransformer of some releases needs a tokenizer to write.
    if hasattr(model, "original_model"):
        lm.trace(model, tokens[0], generate=2, sources="token", method="attention", do_sample=True)
    return t.verify(2)


def _audit(model: Any, tokens: torch.Tensor) -> Any:
    audit = lm.audit(model, tokens[0, :5], answer=tokens[0, 5:], sources=[[1, 2], [3]], passes=9)
    # Most tiny models depend on no source, and so write nothing instead.
    return Passes(audit.trace, audit.trace.sources()[1:], 9).write_instead(1, [0], 2)


CALLS: dict[str, Call] = {
    "first_run": _first_run,
    "context_length": lambda model, tokens: lm.run(model, tokens, "context_length", max_memory=60_000),
    "run": lambda model, tokens: lm.run(model, tokens, "attention"),
    "value_zeroing": lambda model, tokens: lm.run(model, tokens, "value_zeroing", engine="hooks"),
    "input_map": lambda model, tokens: lm.input_map(model, tokens),
    "pruned": _pruned,
    "attention_attribution": _attention_attribution,
    "pruning_curves": _pruning_curves,
    "trace": _trace,
    "audit": _audit,
}


class Patient:
    """A model with unusual settings, and its state before it is interrupted."""

    def __init__(self, label: str) -> None:
        self.model = case_of(label).build()
        self.tokens = tiny_models.tokens(self.model, 1)
        for index, parameter in enumerate(self.model.parameters()):
            parameter.requires_grad_(index % 2 == 0)
        for index, module in enumerate(all_modules(self.model)):
            module.training = index % 2 == 0
        for call in CALLS.values():
            call(self.model, self.tokens)
        self.before = self.state()
        self.logits = self.forward()

    def forward(self) -> torch.Tensor:
        """Return the logits of a plain pass, with the same dropout each time."""
        torch.manual_seed(0)
        with torch.no_grad():
            return self.model(self.tokens)

    def state(self) -> list[Any]:
        """Return everything that must not change, by identity."""
        modules = all_modules(self.model)
        found: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
        found += [torch.is_autocast_enabled("cpu"), torch.get_float32_matmul_precision()]
        found += [signal.getsignal(number) for number in SIGNALS]
        for module in modules:
            found += [tuple(module._forward_hooks), tuple(module._forward_pre_hooks)]
            found += [list(map(id, getattr(module, "fwd_hooks", [])))]
            found += [id(vars(module).get("forward")), module.training]
            found += [getattr(vars(module).get("config"), "_attn_implementation", None)]
            found += [parameter.requires_grad for parameter in module.parameters(recurse=False)]
        return found

    def is_well(self) -> bool:
        """Return whether the model has its old flags and hooks, and no lock is acquired."""
        if self.state() != self.before or not torch.equal(self.forward(), self.logits):
            return False
        other = threading.Thread(target=self._open, daemon=True)
        other.start()
        other.join(10)
        return not other.is_alive()

    def _open(self) -> None:
        with lm.Lens(self.model).evaluation_mode():
            pass


class Moments:
    """Call one signal's handler at a moment when Python could: when a function begins, or one in C ends."""

    def __init__(self, moment: int | None) -> None:
        self.moment, self.seen, self.came, self.arrived = moment, 0, False, False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        # A generator that resumes is not at its first line, but at its `yield`.
        resumes = frame.f_code.co_flags & 0x20 and event == "call"
        if event not in ("call", "c_return") or resumes:
            return
        self.seen += 1
        if self.seen == self.moment:
            self.came = True
            number = SIGNALS[self.moment % len(SIGNALS)]
            handler = signal.getsignal(number)
            assert callable(handler)
            handler(number, frame)


def profiled(call: Call, patient: Patient, moment: int | None) -> Moments:
    """Make one call that is interrupted at a moment. None: do not interrupt, but count the moments."""
    moments = Moments(moment)
    try:
        sys.setprofile(moments)
        call(patient.model, patient.tokens)
    except Came:
        moments.arrived = True
    finally:
        sys.setprofile(None)
    return moments


def interrupted_everywhere(name: str, label: str, count: int) -> tuple[int, list[int]]:
    """Interrupt calls at moments that are spread over a call.

    Returns:
        The number of interrupted calls, and the moments after which the model was not restored, or the call
        did not raise the handler's exception.
    """
    patient, call, left, came = Patient(label), CALLS[name], [], 0
    total = profiled(call, patient, None).seen
    for index in range(count):
        moment = 1 + index * total // count
        moments = profiled(call, patient, moment)
        came += moments.came
        if moments.came != moments.arrived or not patient.is_well():
            left.append(moment)
            patient = Patient(label)
    return came, left


def usual_seconds(call: Call, patient: Patient) -> float:
    """Return the seconds that a call takes without a signal."""
    start = time.perf_counter()
    for _ in range(5):
        call(patient.model, patient.tokens)
    return (time.perf_counter() - start) / 5


def interrupted_by_signals(name: str, label: str, count: int, seed: int = 0) -> int:
    """Return how many real signals, at random times of a call, left a change on the model."""
    patient, call, draw = Patient(label), CALLS[name], random.Random(seed)
    usual = usual_seconds(call, patient)
    came = left = 0
    while came < count:
        inside = True

        def send(after: float = draw.uniform(0, usual), number: int = draw.choice(SIGNALS)) -> None:
            time.sleep(after)
            signal.pthread_kill(threading.main_thread().ident or 0, number)

        sender = threading.Thread(target=send)
        try:
            sender.start()
            call(patient.model, patient.tokens)
            inside = False
            sender.join()
            time.sleep(0.01)
        except Came:
            pass
        sender.join()
        came += inside
        if not patient.is_well():
            left += 1
            patient = Patient(label)
    return left


def interrupted_by_timers(name: str, label: str, count: int, seed: int = 0) -> int:
    """Return how many calls left a change on the model when a timer interrupts each several times.

    The second exception is raised while the first one is being handled.
    """
    patient, call, draw = Patient(label), CALLS[name], random.Random(seed)
    usual = usual_seconds(call, patient)
    came = left = rings = 0

    def timed() -> None:
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, usual))
        call(patient.model, patient.tokens)

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal rings
        is_inside = frame is not None and any(
            f.f_code is timed.__code__ for f, _ in traceback.walk_stack(frame)
        )
        rings += is_inside
        if is_inside and rings < 3:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 1e-3))
        if is_inside:
            raise Came

    before = signal.signal(signal.SIGALRM, ring)
    patient.before = patient.state()
    while came < count:
        rings = 0
        with contextlib.suppress(Came):
            timed()
        signal.setitimer(signal.ITIMER_REAL, 0)
        came += rings > 0
        if not patient.is_well():
            left += 1
            patient = Patient(label)
    signal.signal(signal.SIGALRM, before)
    return left


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for number in SIGNALS:
        signal.signal(number, raise_came)
    many, labels, names = int(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:] or list(CALLS)
    for name in names:
        for label in labels:
            came, left = interrupted_everywhere(name, label, many)
            print(f"{name}, {label}: moments {came}, left {left}", flush=True)
            for way, interrupt in (("signals", interrupted_by_signals), ("timers", interrupted_by_timers)):
                print(f"{name}, {label}: {way} {many}, left {interrupt(name, label, many)}", flush=True)
