"""The command line: `lens-mix map TEXT --model MODEL`, and `serve`, `support`, `check` and `evaluate MODEL`.

Needs the extra `cli` (typer). MODEL is a name or a folder that transformers knows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ImportError as problem:
    raise SystemExit("lens-mix: the command line needs typer: pip install 'lens_mix[cli]'") from problem

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Context mixing for TransformerLens models."
)

_Model = Annotated[str, typer.Argument(help="name or folder of a model that transformers knows")]
_DEFAULT_METHODS = "attention,value_zeroing,attn_res_ln,alti,decompx,gradient_attention,input_gradients"


@app.command("map")
def _map_text(
    text: Annotated[str, typer.Argument(help="the prompt")],
    model: Annotated[str, typer.Option(help="name or folder of a model that transformers knows")],
    method: Annotated[
        list[str] | None, typer.Option(help="a method's name; may be given several times")
    ] = None,
    out: Annotated[Path, typer.Option(help="the page to write, one self-contained file")] = Path("page.html"),
) -> None:
    """Map a prompt and write a page to look through: text, grid, flow, methods side by side.

    Of attention_attribution it also shows the attribution tree, of information_flow_routes the routes.
    """
    from lens_mix import runner
    from lens_mix.lens.model_classes import UnsupportedModelError
    from lens_mix.recommended import input_map
    from lens_mix.view.page import page

    if not out.parent.is_dir():
        raise typer.BadParameter(f"--out: expected a folder that is there, got {out.parent}")
    asked = method or ["attention", "value_zeroing"]
    try:
        # Before the model is loaded.
        runner.read_methods(asked)
        loaded = _load(model)
        maps = runner.run(loaded, text, asked)
        if not method:
            maps["input_map"] = input_map(loaded, text)
    except (ValueError, UnsupportedModelError) as problem:
        raise typer.BadParameter(str(problem)) from problem
    page(maps, out)
    typer.echo(f"{out}: {', '.join(maps)}")


@app.command()
def serve(
    model: _Model,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free")] = 8000,
    tokens: Annotated[int, typer.Option(min=1, help="what a sentence may have")] = 128,
    seconds: Annotated[float, typer.Option(min=0.1, max=86_400, help="what a page may take")] = 60.0,
    waiting: Annotated[int, typer.Option(min=1, help="so many may wait while one is computed")] = 4,
) -> None:
    """A form on this machine (127.0.0.1 alone): type a sentence, pick methods, get the page."""
    from lens_mix.serve import Limits, Site

    try:
        # Before the model is loaded.
        site = Site(port, Limits(tokens, seconds, waiting))
    except OSError as problem:
        raise typer.BadParameter(f"--port: expected one that is free, got {port} ({problem})") from problem
    with site:
        try:
            site.serve(_load(model), typer.echo)
        except KeyboardInterrupt:
            typer.echo("\nThe server has ended.")


@app.command()
def support(model: _Model) -> None:
    """Which methods run on a model, and why others don't."""
    from lens_mix import runner

    typer.echo(str(runner.support(_load(model))))


@app.command()
def check(model: _Model) -> None:
    """The proof: every block rebuilt from its parts."""
    from lens_mix.lens.proof import support as proofs

    typer.echo(str(proofs.check(_load(model))))


@app.command()
def evaluate(
    model: _Model,
    prompts: Annotated[Path | None, typer.Option(help="a text file, one prompt per line: importance")] = None,
    blimp: Annotated[Path | None, typer.Option(help="a BLiMP file (.jsonl): the word that decides")] = None,
    planted: Annotated[int, typer.Option(help="so many long prompts with a planted fact")] = 0,
    methods: Annotated[str, typer.Option(help="names, separated by commas")] = _DEFAULT_METHODS,
    aggregations: Annotated[str, typer.Option(help="names, separated by commas")] = "rollout,mean",
    randomised_model: Annotated[bool, typer.Option(help="score shuffled weights too")] = False,
    resume: Annotated[Path | None, typer.Option(help="file of finished cases, to go on from")] = None,
    out: Annotated[Path | None, typer.Option(help="write the table to a .md or .csv file, or a .png")] = None,
) -> None:
    """Score methods on one task: --prompts, --blimp or --planted."""
    from lens_mix import evaluation

    given = [name for name, value in (("prompts", prompts), ("blimp", blimp), ("planted", planted)) if value]
    if len(given) != 1:
        raise typer.BadParameter(
            f"expected exactly one of --prompts, --blimp, --planted; got {given or 'none'}"
        )
    if out is not None and out.suffix not in (".md", ".csv", ".png"):
        raise typer.BadParameter(f"--out: expected a .md, .csv or .png file; got {out.name!r}")
    loaded = _load(model)
    task: evaluation.Task
    if prompts is not None:
        lines = [line for line in prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
        task = evaluation.Importance(lines)
    elif blimp is not None:
        task = evaluation.Cues(evaluation.blimp_cases(loaded, blimp))
    else:
        task = evaluation.Cues(evaluation.planted_facts(loaded, planted), leave_out=(0,))
    try:
        board = evaluation.evaluate(
            loaded,
            task,
            methods.split(","),
            aggregations.split(","),
            randomised_model=randomised_model,
            resume=resume,
            progress=True,
        )
    except ValueError as problem:
        raise typer.BadParameter(str(problem)) from problem
    typer.echo(board.to_markdown("position"))
    for method, reason in board.refused.items():
        typer.echo(f"{method}: {reason}", err=True)
    if out is not None:
        _write(board, out)


def _write(board: Any, out: Path) -> None:
    from lens_mix.files import replacing

    with replacing(out) as file:
        if out.suffix == ".png":
            board.show().savefig(file, format="png")
        elif out.suffix == ".csv":
            board.table().to_csv(file, index=False)
        else:
            Path(file).write_text(board.to_markdown("position") + "\n", encoding="utf-8")


def _load(name: str) -> Any:
    """A TransformerBridge where this TransformerLens has one, else a HookedTransformer."""
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError:
        from transformer_lens import HookedTransformer

        return HookedTransformer.from_pretrained_no_processing(name)
    return TransformerBridge.boot_transformers(name)


if __name__ == "__main__":
    app()
