"""Define the command line: `lens-mix map TEXT --model MODEL`, and `serve`, `support`, `check` and `evaluate`.

It needs the extra `cli` (typer). MODEL is the name or the folder of a model that transformers can load. An
error is one line on the standard error. The exit code is 2 for a wrong argument or file and for a model that
cannot be used, and 1 for any other error. LENS_MIX_DEBUG=1 in the environment shows the traceback.
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from typer.core import TyperGroup
except ImportError as problem:
    raise SystemExit("lens-mix: the command line needs typer: pip install 'lens_mix[cli]'") from problem

_LONGEST_LINE = 600  # the most characters of an error; some libraries list all valid values in their errors


class _Commands(TyperGroup):
    """Run the commands, and show an error in one of them as one line."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> Any:
        """Run a command and exit."""
        args = list(sys.argv[1:] if args is None else args) or ["--help"]
        if os.environ.get("LENS_MIX_DEBUG"):
            return super().main(args, *rest, **options)
        try:
            code = super().main(args, *rest, **{**options, "standalone_mode": False})
        except Exception as problem:
            text, code = _describe(problem)
            typer.echo(f"lens-mix: {textwrap.shorten(text, _LONGEST_LINE, placeholder=' ...')}", err=True)
        sys.exit(code if isinstance(code, int) else 0)


def _describe(problem: Exception) -> tuple[str, int]:
    """Return the text that is shown for an error, and the exit code."""
    if hasattr(problem, "format_message"):  # true of typer's own errors about arguments
        context = getattr(problem, "ctx", None)
        advice = f" ({context.command_path} --help lists the arguments)" if context else ""
        return f"{problem.format_message()}{advice}", 2
    if isinstance(problem, typer.Abort):
        return "interrupted", 1
    if isinstance(problem, (ValueError, OSError, ImportError)):
        return str(problem) or type(problem).__name__, 2
    return f"{type(problem).__name__}: {problem} (LENS_MIX_DEBUG=1 in the environment shows where)", 1


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Context mixing for TransformerLens models.",
    epilog="LENS_MIX_DEBUG=1 in the environment shows the traceback of an error.",
)

_Model = Annotated[str, typer.Argument(help="name or folder of a model that transformers can load")]
_DEFAULT_METHODS = "attention,value_zeroing,attn_res_ln,alti,decompx,gradient_attention,input_gradients"


@app.command("map")
def _map_text(
    text: Annotated[str, typer.Argument(help="the prompt")],
    model: Annotated[str, typer.Option(help="name or folder of a model that transformers can load")],
    method: Annotated[
        list[str] | None, typer.Option(help="a method's name; may be given several times")
    ] = None,
    out: Annotated[Path, typer.Option(help="the page to write, one self-contained file")] = Path("page.html"),
) -> None:
    """Map a prompt and write a page with several views: text, grid, flow, methods side by side.

    For attention_attribution the page also has the attribution tree, for information_flow_routes the routes.
    """
    from lens_mix import runner
    from lens_mix.recommended import input_map
    from lens_mix.view.page import page

    # The arguments are checked first, because loading a model takes long.
    _check_writable("--out", out)
    if not text.strip():
        raise ValueError(f"TEXT: expected a prompt, got {text!r}")
    names = method or ["attention", "value_zeroing"]
    runner.read_methods(names)
    loaded = _load(model)
    maps = runner.run(loaded, text, names)
    if not method:
        maps["input_map"] = input_map(loaded, text)
    page(maps, out)
    typer.echo(f"{out}: {', '.join(maps)}")


@app.command()
def serve(
    model: _Model,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to listen on; 0: any free port")] = 8000,
    tokens: Annotated[int, typer.Option(min=1, help="largest number of tokens of a sentence")] = 128,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=86_400, help="longest time for a page, in seconds")
    ] = 60.0,
    waiting: Annotated[
        int, typer.Option(min=1, help="largest number of sentences that wait while one is computed")
    ] = 4,
) -> None:
    """Serve a form on this machine only (127.0.0.1): type a sentence, pick methods, get the page."""
    from lens_mix.serve import Limits, Site

    if not math.isfinite(seconds):
        raise ValueError(f"--seconds: expected a finite number, got {seconds}")
    try:
        # The port is bound first, because loading a model takes long.
        site = Site(port, Limits(tokens, seconds, waiting))
    except OSError as problem:
        raise ValueError(f"--port: expected one that is free, got {port} ({problem})") from problem
    with site:
        try:
            site.serve(_load(model), typer.echo)
        except KeyboardInterrupt:
            typer.echo("\nThe server has ended.")


@app.command()
def support(model: _Model) -> None:
    """List the methods that run on a model, and the reason why each other one does not."""
    from lens_mix import runner

    typer.echo(str(runner.support(_load(model))))


@app.command()
def check(model: _Model) -> None:
    """Check that every block can be rebuilt from its components, as most methods need."""
    from lens_mix.lens.verification import support as verification

    typer.echo(str(verification.check(_load(model))))


@app.command()
def evaluate(
    model: _Model,
    prompts: Annotated[
        Path | None, typer.Option(help="a text file with a prompt on each line: scores importance")
    ] = None,
    blimp: Annotated[
        Path | None, typer.Option(help="a BLiMP file (.jsonl): scores whether the decisive word is found")
    ] = None,
    planted: Annotated[
        int,
        typer.Option(
            min=0, help="the number of long prompts with a planted fact: scores whether the fact is found"
        ),
    ] = 0,
    methods: Annotated[str, typer.Option(help="names of methods, separated by commas")] = _DEFAULT_METHODS,
    aggregations: Annotated[
        str, typer.Option(help="names of aggregations, separated by commas")
    ] = "rollout,mean",
    randomised_model: Annotated[
        bool, typer.Option(help="also score the model with shuffled weights, as a control")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(help="file with the finished cases; a second run computes only the others")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="file to write: the table (.md or .csv) or a figure (.png)")
    ] = None,
) -> None:
    """Score methods on one task: --prompts, --blimp or --planted."""
    from lens_mix import evaluation, runner
    from lens_mix.arguments import check_file_path

    given = [name for name, value in (("prompts", prompts), ("blimp", blimp), ("planted", planted)) if value]
    if len(given) != 1:
        raise ValueError(f"expected exactly one of --prompts, --blimp, --planted; got {given or 'none'}")
    # The arguments are checked first, because loading a model takes long.
    if out is not None:
        if out.suffix not in (".md", ".csv", ".png"):
            raise ValueError(f"--out: expected a .md, .csv or .png file; got {out.name!r}")
        _check_writable("--out", out)
    if resume is not None and resume.is_dir():
        raise ValueError(f"--resume: expected a file, got the folder {resume}")
    runner.read_methods(methods.split(","))
    lines = _read_prompts(prompts) if prompts is not None else []
    if blimp is not None:
        check_file_path("--blimp", blimp)
    loaded = _load(model)
    task: evaluation.Task
    if lines:
        task = evaluation.Importance(lines)
    elif blimp is not None:
        task = evaluation.Cues(evaluation.blimp_cases(loaded, blimp))
    else:
        task = evaluation.Cues(evaluation.planted_facts(loaded, planted), leave_out=(0,))
    board = evaluation.evaluate(
        loaded,
        task,
        methods.split(","),
        aggregations.split(","),
        randomised_model=randomised_model,
        resume=resume,
        progress=True,
    )
    typer.echo(board.to_markdown("position"))
    for method, reason in board.refused.items():
        typer.echo(f"{method}: {reason}", err=True)
    if out is not None:
        _write(board, out)


def _read_prompts(path: Path) -> list[str]:
    """Return the lines of a text file, without blank ones."""
    from lens_mix.arguments import check_file_path

    try:
        text = Path(check_file_path("--prompts", path)).read_text(encoding="utf-8")
    except UnicodeDecodeError as problem:
        raise ValueError(f"--prompts: expected a text file in UTF-8, got {path}: {problem}") from problem
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"--prompts: expected a prompt on each line, got none in {path}")
    return lines


def _check_writable(option: str, path: Path) -> None:
    """Raise an error unless a file can be written at the path."""
    from lens_mix.arguments import check_file_path

    check_file_path(option, path, write=True)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"{option}: expected a file that can be written, got {path}")


def _write(board: Any, out: Path) -> None:
    from lens_mix.files import replacing

    with replacing(out) as beside:
        if out.suffix == ".png":
            board.show().savefig(beside)
        elif out.suffix == ".csv":
            board.table().to_csv(beside, index=False)
        else:
            Path(beside).write_text(board.to_markdown("position") + "\n", encoding="utf-8")


def _load(name: str) -> Any:
    """Load a TransformerBridge, or a HookedTransformer if this TransformerLens has no bridge."""
    try:
        return _load_unchecked(name)
    # Every exception is caught, because libraries raise errors of many types for an unknown name, a missing
    # network, a broken file or too little memory.
    except Exception as problem:
        raise ValueError(
            f"MODEL: expected the name or the folder of a model that can be loaded, got {name!r}: "
            f"{type(problem).__name__}: {problem}"
        ) from problem


def _load_unchecked(name: str) -> Any:
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError:
        from transformer_lens import HookedTransformer

        return HookedTransformer.from_pretrained_no_processing(name)
    return TransformerBridge.boot_transformers(name)


if __name__ == "__main__":
    app()
