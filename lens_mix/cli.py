"""Define the command line: `lens-mix map MODEL TEXT`, `trace`, `audit`, `methods`, `evaluate` and others.

It needs the extra `cli` (typer). MODEL is the name or the folder of a model that transformers can load. An
error is one line on the standard error. The exit code is 1 for an audit in which a claim fails, 2 for a wrong
argument or file and for a model that cannot be used, 3 for a corpus with failed prompts, 130 after Ctrl-C,
and 4 for any other error. LENS_MIX_DEBUG=1 in the environment shows the traceback.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import json
import math
import os
import re
import socket
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from typer.core import TyperGroup
except ImportError as problem:
    raise SystemExit("lens-mix: the command line needs typer: pip install 'lens_mix[cli]'") from problem

# Errors of the library that start with these name an argument that is an option here.
_NAMED_AS_OPTIONS = tuple(
    f"{name}: "
    for name in (
        *("queries", "layers", "span", "answer", "generate", "sources", "keep", "passes"),
        *("aggregation", "column", "out"),
    )
)
_LONGEST_LINE = 600  # the most characters of an error; some libraries list all valid values in their errors
# A pipeline distinguishes them: 1 says that the audit ran.
_FAILED_CLAIM, _WRONG, _FAILED_PROMPT, _OTHER_ERROR, _INTERRUPTED = 1, 2, 3, 4, 130


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
        return f"{problem.format_message()}{advice}", _WRONG
    if isinstance(problem, typer.Abort):
        return "interrupted", _INTERRUPTED
    if isinstance(problem, (ValueError, OSError, ImportError)):
        text = str(problem) or type(problem).__name__
        return f"--{text}" if text.startswith(_NAMED_AS_OPTIONS) else text, _WRONG
    shown = f"{type(problem).__name__}: {problem} (LENS_MIX_DEBUG=1 in the environment shows where)"
    return shown, _OTHER_ERROR


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Measure context mixing: which token's information went into which token's representation.",
    epilog="Start with: lens-mix map HuggingFaceTB/SmolLM2-135M 'The Eiffel Tower is in the city of'\n\n"
    "LENS_MIX_DEBUG=1 in the environment shows the traceback of an error.",
)

_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Name or folder of a model that transformers can load.", show_default=False
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
_DEFAULT_GENERATED = 64
# Other files in a folder of documents are not read.
_DOCUMENT_ENDINGS = (".txt", ".md")
_DEFAULT_FAILING = ("from memory", "unclear")
_DEFAULT_EVALUATED = (
    *("attention", "value_zeroing", "attn_res_ln", "alti", "decompx"),
    *("gradient_attention", "input_gradients"),
)


def _option(help_text: str, metavar: str, **settings: Any) -> Any:
    """Return an option whose default the text of its help names."""
    return typer.Option(help=help_text, metavar=metavar, show_default=False, **settings)


# The options that `trace` and `audit` have in common.
_Question = Annotated[str, _option("The question about the documents.", "TEXT")]
_Instruction = Annotated[str, _option("The instruction to the model, before the documents.", "TEXT")]
_Answer = Annotated[
    str | None,
    _option(
        "What was written after the prompt, with its first space if it needs one. Default: what the model "
        "writes.",
        "TEXT",
    ),
]
_AnswerFile = Annotated[
    Path | None, _option("A text file with what was written; blanks at its end are removed.", "FILE")
]
_Generate = Annotated[
    int | None,
    _option(
        f"The largest number of tokens that the model writes. Default: {_DEFAULT_GENERATED}.", "NUMBER", min=1
    ),
]
_Sources = Annotated[
    str,
    _option("What the sources are: token, word, sentence, message or document. Default: sentence.", "UNIT"),
]
_TraceOut = Annotated[Path | None, _option("Write the page of the trace to this file.", "FILE")]
_TraceOpen = Annotated[bool, typer.Option("--open", help="Open the page of the trace in the browser.")]


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from lens_mix.version import __version__

        typer.echo(f"lens-mix {__version__}")
        raise typer.Exit


@app.callback()
def _all_commands(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Take the options that are given before a command."""


@app.command("map")
def _map_text(
    model: _Model,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The prompt.", show_default=False)],
    method: Annotated[
        list[str] | None,
        _option(
            "A method of `lens-mix methods`; repeat it for several. Default: input_map, attention and "
            "value_zeroing.",
            "NAME",
        ),
    ] = None,
    queries: Annotated[
        str | None,
        _option(
            "The positions to explain, such as 0,5,-1 (-1 is the last one) or 0:5, a text of the prompt, or "
            "all. Default: all, but only the last one (an encoder's first one) with methods that cost "
            "forward passes for each.",
            "POSITIONS",
        ),
    ] = None,
    layers: Annotated[
        str | None, _option("The layers to map, written like positions. Default: all.", "LAYERS")
    ] = None,
    target: Annotated[
        str | None,
        _option(
            "The token to explain, such as Paris, with or without the space before it. Default: the token "
            "that the model predicts.",
            "TEXT",
        ),
    ] = None,
    against: Annotated[
        str | None,
        _option("Explain how much the model prefers the target to this token, such as Rome.", "TEXT"),
    ] = None,
    per_head: Annotated[bool, typer.Option("--per-head", help="Make a map of each head.")] = False,
    out: Annotated[Path | None, _option("Write the page of all views to this file.", "FILE")] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page of all views in the browser.")] = False,
    as_json: _Json = False,
) -> None:
    """Print which tokens of a prompt each method points to.

    The result is text, or JSON with --json. With --out or --open it is also one self-contained page, with
    all layers, heads and positions.
    """
    from lens_mix import named_maps, report
    from lens_mix.view.page import page

    # The arguments are checked first, because loading a model takes long.
    if not text.strip():
        raise ValueError(f"TEXT: expected a prompt, got {text!r}")
    if out is not None:
        _check_writable("--out", out)
    chosen_rows, chosen_layers = _read_queries(queries), _read_selection("--layers", layers)
    names = method or [name for name in named_maps.DEFAULT_METHODS if not per_head or name != "input_map"]
    _check_methods(names)
    _check_aim(named_maps.read_names(names, per_head=per_head), target=target, against=against)
    maps = named_maps.compute_maps(
        _load_for_text(model),
        text,
        names,
        queries=chosen_rows,
        all_rows=queries == "all",
        layers=chosen_layers,
        per_head=per_head,
        target=target,
        against=against,
        progress=_progress(),
    )
    if as_json:
        _print_json(report.to_records(maps, every_row=queries is not None))
    else:
        typer.echo(report.describe_maps(maps, every_row=queries is not None))
    if out is not None:
        page(maps, out)
    opened = page(maps).open() if show else None
    for path in filter(None, (out, opened)):
        typer.echo(f"\nwrote the page of all views: {path}", err=as_json)
    if not (out or show or as_json):
        typer.echo("\n--open shows the page of all views, --out page.html writes it")


@app.command("trace")
def _trace_text(
    model: _Model,
    text: Annotated[
        str | None,
        typer.Argument(metavar="TEXT", help="The prompt, if it is not made of documents."),
    ] = None,
    document: Annotated[
        list[str] | None,
        _option(
            "A document of the prompt: a text file, as NAME=FILE or as FILE, whose name without ending is "
            "then the document's name, or a folder with such files (.txt, .md); repeat it for several.",
            "NAME=FILE",
        ),
    ] = None,
    question: _Question = "",
    instruction: _Instruction = "",
    answer: _Answer = None,
    answer_file: _AnswerFile = None,
    generate: _Generate = None,
    sources: _Sources = "sentence",
    span: Annotated[
        list[str] | None,
        _option(
            "A part of what was written, to list its sources; repeat it for several. Default: each sentence.",
            "TEXT",
        ),
    ] = None,
    top: Annotated[
        int, _option("The number of sources to list for each part. Default: 5.", "NUMBER", min=1)
    ] = 5,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Measure what each part loses without each listed source: a forward pass for each.",
        ),
    ] = False,
    method: Annotated[
        str | None,
        _option("A method of `lens-mix methods`. Default: the one with the best evidence.", "NAME"),
    ] = None,
    aggregation: Annotated[
        str | None,
        _option(
            "How the maps of the layers become one, for methods with layer maps (mean, max, rollout, ...). "
            "Default: mean.",
            "NAME",
        ),
    ] = None,
    out: _TraceOut = None,
    show: _TraceOpen = False,
    as_json: _Json = False,
) -> None:
    """Print which sentences of a prompt, or documents, a written text came from.

    The prompt is TEXT, or documents with a question. The result is text, or JSON with --json. With --out or
    --open it is also one self-contained page: click a written sentence, and its sources are colored.
    """
    from lens_mix import report
    from lens_mix.traces.attribution import find_aggregation

    # The arguments are checked first, because loading a model takes long.
    prompt = _read_traced(text, document or [], question, instruction)
    written = _read_written(answer, answer_file, generate)
    _check_trace(sources, out)
    if method is not None:
        _check_methods([method], allow_input_map=False)
    find_aggregation(aggregation)
    options = {"sources": sources, "method": method, "aggregation": aggregation}
    traced = _make_trace(model, prompt, written, generate, **options)
    parts = [traced[part] for part in span] if span else traced.spans
    if verify:
        for part in parts:
            part.verify(top)
    if as_json:
        _print_json(report.trace_record(traced, parts, top))
    else:
        typer.echo(report.describe_trace(traced, parts, top))
    _show_page(traced, out, show, is_text=not as_json)


@app.command("audit")
def _audit_answer(
    model: _Model,
    documents: Annotated[
        list[str],
        typer.Argument(
            metavar="DOCUMENTS",
            help="The documents: folders, whose files that end in .txt or .md are documents named like the "
            "files; single text files; or files with a name, as NAME=FILE.",
            show_default=False,
        ),
    ],
    question: _Question = "",
    instruction: _Instruction = "",
    answer: _Answer = None,
    answer_file: _AnswerFile = None,
    generate: _Generate = None,
    sources: _Sources = "sentence",
    span: Annotated[
        list[str] | None,
        _option(
            "A part of what was written that is a claim; repeat it for several. Default: each sentence.",
            "TEXT",
        ),
    ] = None,
    keep: Annotated[
        list[str] | None,
        _option(
            "A text of the prompt that stays in every pass, such as a question; repeat it for several. "
            "Default: the question and the instruction.",
            "TEXT",
        ),
    ] = None,
    passes: Annotated[
        int | None,
        _option(
            "The largest number of forward passes for all claims together. Default: 24 for each claim.",
            "NUMBER",
            min=2,
        ),
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        _option(
            "The verdicts with which a claim fails, with commas between them: supported, redundant, "
            "conflicting, from-memory or unclear; or none. Default: from-memory,unclear.",
            "VERDICTS",
        ),
    ] = None,
    out: _TraceOut = None,
    show: _TraceOpen = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the result as Markdown.")] = False,
    as_json: _Json = False,
) -> None:
    """Print what each claim of an answer about documents rests on.

    The claims are read again without some of the sources, and get a verdict. A claim is supported if it needs
    one source, redundant if each of several is enough, conflicting if another source says something else, and
    from memory if it hardly needs any. It is unclear if the measurements do not decide.

    The exit code is 0 if no claim fails, and 1 if one has a verdict of --fail-on. Otherwise the audit did not
    run: 2 for a wrong argument, file or model, 130 after Ctrl-C and 4 for any other error.
    """
    from lens_mix import report
    from lens_mix.traces.documents import Documents

    # The arguments are checked first, because loading a model takes long.
    texts = _read_documents("DOCUMENTS", documents)
    written = _read_written(answer, answer_file, generate)
    _check_trace(sources, out)
    failing = _read_verdicts(fail_on)
    if as_json and as_markdown:
        raise ValueError("--json, --markdown: expected one of the two, got both")
    prompt = Documents(texts, question=question, instruction=instruction)
    traced = _make_trace(model, prompt, written, generate, sources=sources)
    found = traced.audit(span, keep=keep, passes=passes)
    if as_json:
        _print_json(json.loads(found.to_json()))
    else:
        typer.echo(found.to_markdown() if as_markdown else report.describe_audit(found))
    _show_page(traced, out, show, is_text=not (as_json or as_markdown))
    failed = [claim for claim in found if claim.verdict in failing]
    if failed:
        count = f"{len(failed)} of {len(found)} claims"
        typer.echo(f"lens-mix: {count} failed (--fail-on): {report.count_verdicts(failed)}", err=True)
        raise typer.Exit(_FAILED_CLAIM)


@app.command()
def methods(as_json: _Json = False) -> None:
    """List the methods in groups: what a map says, and what it costs."""
    from lens_mix.method_list import PLUGINS, read_descriptions

    described = read_descriptions()
    # Methods of installed packages have to be imported, and with them torch and all other methods.
    if importlib.metadata.entry_points(group=PLUGINS):
        from lens_mix import registry

        described = {name: registry.describe(name) for name in registry.list_names()}
    if as_json:
        _print_json(
            [
                {"name": name, "group": group, "says": line, "cost": str(cost) if cost else None}
                for name, (group, line, cost) in described.items()
            ]
        )
        return
    lines: list[str] = []
    for group in dict.fromkeys(one.group for one in described.values()):
        lines += ["", group]
        for name, one in described.items():
            if one.group == group:
                lines += [f"  {name:<24}{one.line}", f"  {'':<24}{one.cost_in_words}"]
    typer.echo("\n".join(lines[1:]))


@app.command()
def serve(
    model: _Model,
    port: Annotated[
        int | None,
        _option(
            "The port to listen on. Default: the first free one from 7860 on.", "NUMBER", min=1, max=65535
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, metavar="NUMBER", help="The largest number of tokens of a map's prompt.")
    ] = 128,
    trace_tokens: Annotated[
        int,
        typer.Option(
            min=1, metavar="NUMBER", help="The largest number of tokens of a trace's documents and question."
        ),
    ] = 512,
) -> None:
    """Serve an app in the browser: maps of a prompt, and traces of answers about documents.

    It answers on this machine only (127.0.0.1), and ends with Ctrl-C. It needs the extra `serve` (gradio).
    """
    from lens_mix.app import launch

    # The port is tried first, because loading a model takes long.
    _check_free(port)
    served, url = launch(_load_for_text(model), map_tokens=tokens, trace_tokens=trace_tokens, port=port)
    typer.echo(f"{url} (Ctrl-C ends it)")
    served.block_thread()


def _check_free(port: int | None) -> None:
    """Raise an error unless a port of this machine can be used."""
    try:
        if port is not None:
            socket.create_server(("127.0.0.1", port)).close()
    except OSError as problem:
        raise ValueError(f"--port: expected one that is free, got {port} ({problem})") from problem


@app.command()
def support(model: _Model, as_json: _Json = False) -> None:
    """List the methods that run on a model, and why others do not."""
    from lens_mix import supported_methods

    table = supported_methods.support(_load(model))
    if not as_json:
        typer.echo(str(table))
        return
    rows = [{"name": name, "engine": engine, "reason": reason or None} for name, engine, reason in table]
    _print_json({"model": _name(table.model), "methods": rows})


@app.command()
def check(model: _Model, as_json: _Json = False) -> None:
    """Check that blocks can be rebuilt, as most methods need.

    Every block is rebuilt from its components and compared with the model.
    """
    from lens_mix._verification import support as verification

    found = verification.check(_load(model))
    if not as_json:
        typer.echo(str(found))
        return
    table = found.to_dataframe()
    _print_json({"model": _name(found.model), "ok": found.ok, "components": table.to_dict("records")})


@app.command()
def evaluate(
    model: _Model,
    prompts: Annotated[
        Path | None, _option("Score importance: a text file with a prompt on each line.", "FILE")
    ] = None,
    blimp: Annotated[
        Path | None, _option("Score whether the decisive word is found: a BLiMP file (.jsonl).", "FILE")
    ] = None,
    planted: Annotated[
        int, _option("Score whether a planted fact is found: the number of long prompts.", "NUMBER", min=0)
    ] = 0,
    method: Annotated[
        list[str] | None,
        _option(
            "A method of `lens-mix methods`; repeat it for several. Default: "
            f"{', '.join(_DEFAULT_EVALUATED)}.",
            "NAME",
        ),
    ] = None,
    aggregation: Annotated[
        list[str] | None,
        _option(
            "How the maps of the layers become one (rollout, mean, flow, ...); repeat it for several. "
            "Default: rollout and mean.",
            "NAME",
        ),
    ] = None,
    randomised_model: Annotated[
        bool,
        typer.Option("--randomised-model", help="Also score the model with shuffled weights, as a control."),
    ] = False,
    resume: Annotated[
        Path | None,
        _option("A file with the finished cases; a second run computes only the others.", "FILE"),
    ] = None,
    out: Annotated[
        Path | None, _option("Write the table (.md or .csv) or a figure (.png) to this file.", "FILE")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Score methods on one task: --prompts, --blimp or --planted.

    The result is a table with 95 % intervals, and whether anything beats a random order and the position.
    """
    from lens_mix import evaluation, experiments, named_maps
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
    names = method or list(_DEFAULT_EVALUATED)
    _check_methods(names)
    named_maps.read_names(names)
    lines = _read_prompts(prompts) if prompts is not None else []
    if blimp is not None:
        check_file_path("--blimp", blimp)
    loaded = _load_for_text(model)
    task: evaluation.Task
    if lines:
        task = evaluation.Importance(lines)
    elif blimp is not None:
        task = evaluation.Cues(experiments.blimp_cases(loaded, blimp))
    else:
        task = evaluation.Cues(experiments.planted_facts(loaded, planted), leave_out=(0,))
    methods_of_names = named_maps.find_methods(loaded, names)
    board = evaluation.evaluate(
        loaded,
        task,
        list(methods_of_names.values()),
        aggregation or ["rollout", "mean"],
        randomised_model=randomised_model,
        resume=resume,
        progress=bool(_progress()),
    )
    if as_json:
        table = board.table("position")
        record = {"model": _name(board.model), "task": board.task, "table": table.to_dict("records")}
        _print_json({**record, "verdict": board.verdict(), "refused": board.refused})
    else:
        typer.echo("\n".join([board.to_markdown("position"), "", *board.verdict()]))
        if named_maps.INPUT_MAP in methods_of_names:
            typer.echo(f"input_map is {methods_of_names[named_maps.INPUT_MAP].name} on this model.")
        for name, reason in board.refused.items():
            typer.echo(f"{name}: {reason}", err=True)
    if out is not None:
        _write(board, out)
        typer.echo(f"wrote {out}", err=as_json)


@app.command()
def corpus(
    model: _Model,
    prompts: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="The prompts: text with one on each line (.txt or a pipe), or rows (.jsonl, .json, .csv, "
            ".tsv, .parquet).",
            show_default=False,
        ),
    ],
    out: Annotated[str, _option("The folder for the results; a second run continues in it.", "FOLDER")],
    method: Annotated[
        list[str] | None,
        _option("A method of `lens-mix methods`; repeat it for several. Default: attention.", "NAME"),
    ] = None,
    mean: Annotated[
        list[str] | None,
        _option(
            "Also write mean, spread and count of scores in groups, such as layer,key_kind or layer,offset; "
            "repeat it for several.",
            "GROUPS",
        ),
    ] = None,
    per_row: Annotated[
        bool, typer.Option("--per-row", help="Add up the keys of a group in each row before the mean.")
    ] = False,
    maps: Annotated[bool, typer.Option("--maps/--no-maps", help="Whether to write the maps.")] = True,
    column: Annotated[str, _option("The column with the prompt. Default: text.", "NAME")] = "text",
    field: Annotated[
        list[str] | None, _option("A further column to keep with each prompt; repeat it.", "NAME")
    ] = None,
    queries: Annotated[
        str | None, _option("The positions to explain, as in `lens-mix map`. Default: all.", "POSITIONS")
    ] = None,
    layers: Annotated[
        str | None, _option("The layers to map, written like positions. Default: all.", "LAYERS")
    ] = None,
    dtype: Annotated[
        str, _option("The type of scores in the files: float32, float64 or float16.", "NAME")
    ] = "float32",
    shard_size: Annotated[
        int, _option("The number of prompts of a file. Default: 256.", "NUMBER", min=1)
    ] = 256,
    shard: Annotated[
        str | None,
        _option(
            "Compute only every n-th file, as one of n processes, such as 0/4. Default: from the environment "
            "of torchrun, accelerate or SLURM.",
            "I/N",
        ),
    ] = None,
    actors: Annotated[
        int | None,
        _option("The number of processes on a Ray cluster; needs lens_mix[ray].", "NUMBER", min=1),
    ] = None,
    max_memory: Annotated[
        int | None, _option("The bytes for the temporary tensors of a batch.", "NUMBER", min=1)
    ] = None,
    retry: Annotated[
        bool, typer.Option("--retry", help="Compute the files again in which a prompt failed.")
    ] = False,
    allow_versions: Annotated[
        bool,
        typer.Option(
            "--allow-versions",
            help="Continue a run of other releases of torch, transformers, TransformerLens or lens_mix.",
        ),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Map a corpus: many prompts, in files that survive an interruption.

    The exit code is 3 if the run is complete but some prompts have no map. The reasons are in the files.
    """
    from lens_mix.corpus import job, reductions

    names = method or ["attention"]
    _check_methods(names, allow_input_map=False)
    reduce = {
        groups.replace(",", "_"): reductions.Mean(by=groups.split(","), per="row" if per_row else "cell")
        for groups in mean or []
    }
    done = job.run(
        functools.partial(_load, model),
        prompts,
        names,
        reduce or None,
        out,
        column=column,
        fields=field or (),
        keep_maps=maps,
        dtype=dtype,
        shard_size=shard_size,
        rank=_read_rank(shard),
        actors=actors,
        retry=retry,
        allow_versions=allow_versions,
        progress=bool(_progress()),
        max_memory=max_memory,
        queries=_read_queries(queries),
        layers=_read_selection("--layers", layers),
    )
    if as_json:
        _print_json(vars(done))
    else:
        state = "all files are there" if done.is_finished else "other processes have not finished"
        reused = f", {done.reused} of them finished before" if done.reused else ""
        typer.echo(f"{done.prompts} prompts{reused}, {done.failed} of them failed; {state}: {done.out}")
    if done.failed:
        raise typer.Exit(_FAILED_PROMPT)


def _read_rank(text: str | None) -> tuple[int, int] | None:
    """Return the number of a process and that of all from a text such as 0/4; None for None."""
    if text is None:
        return None
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise ValueError(f"--shard: expected I/N with I from 0 to N - 1, such as 0/4, got {text!r}")
    return int(index), int(count)


def _progress() -> bool | None:
    """Return True if bars can be seen; else None, so that nothing warns of long runs either."""
    return True if sys.stderr.isatty() else None


def _check_methods(names: Sequence[str], allow_input_map: bool = True) -> None:
    """Raise an error for an unknown method."""
    from lens_mix import registry
    from lens_mix.named_maps import INPUT_MAP

    for name in names:
        try:
            if name != INPUT_MAP or not allow_input_map:
                registry.find_method(name)
        except ValueError:
            close = difflib.get_close_matches(name, registry.list_names(), 1)
            suggestion = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"--method: expected a name that `lens-mix methods` lists, got {name!r}{suggestion}"
            ) from None


def _read_selection(option: str, text: str | None) -> list[int] | slice | None:
    """Return the numbers or the range that an option selects; None for all."""
    if text is None or text == "all":
        return None
    try:
        if ":" in text:
            start, stop = (int(end) if end.strip() else None for end in text.split(":"))
            return slice(start, stop)
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(
            f"{option}: expected whole numbers such as 0,5,-1, a range such as 0:5, or all, got {text!r}"
        ) from None


def _read_queries(text: str | None) -> list[int] | slice | str | None:
    """Return the positions that --queries selects: numbers, a range, or a text of the prompt."""
    # A text of signs and digits alone is a wrong number, which is an error before the model is loaded.
    has_letters = text is not None and text != "all" and re.search(r"[^\d\s,:+-]", text) is not None
    return text if has_letters else _read_selection("--queries", text)


def _check_aim(methods: Mapping[str, Any], **aim: str | None) -> None:
    """Raise an error for --target or --against if no method explains a target."""
    given = [name for name, text in aim.items() if text is not None]
    if given and not any(method is None or method.target is not None for method in methods.values()):
        raise ValueError(
            f"--{given[0]}: expected a method that explains a target, such as input_map, got "
            f"{', '.join(methods)}, without a target"
        )


def _name(model: str) -> str:
    """Return the name of a model without the folders of this computer."""
    from lens_mix._classes.model_names import strip_path

    return strip_path(model)


def _print_json(value: Any) -> None:
    """Print a value as JSON; numbers that JSON does not have become null."""
    typer.echo(json.dumps(_without_nan(value), ensure_ascii=False, allow_nan=False))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(entry) for entry in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value.item() if hasattr(value, "item") else value


def _read_prompts(path: Path) -> list[str]:
    """Return the texts of a file: its lines without blank ones, or those of its rows."""
    from lens_mix.arguments import check_file_path
    from lens_mix.corpus.entries import read_shards

    check_file_path("--prompts", path)
    texts: list[str] = []
    for shard in read_shards(path, 256, "text", ()):
        for entry in shard.entries:
            if not isinstance(entry.prompt, str):
                reason = entry.error or "expected text, got a prompt of another kind"
                raise ValueError(f"--prompts: prompt {entry.number} in {path}: {reason}")
            texts.append(entry.prompt)
    return texts


def _read_traced(text: str | None, documents: Sequence[str], question: str, instruction: str) -> Any:
    """Return the prompt of a trace: the text, or the documents in the files with what belongs to them."""
    from lens_mix.traces.documents import Documents

    if text is not None and documents:
        raise ValueError(
            "TEXT, --document: expected one of the two, got both; a question about documents is --question"
        )
    if text is None and not documents:
        raise ValueError("TEXT, --document: expected a prompt or documents, got neither")
    if text is not None:
        if question or instruction:
            raise ValueError("--question, --instruction: expected documents with them, got only TEXT")
        if not text.strip():
            raise ValueError(f"TEXT: expected a prompt, got {text!r}")
        return text
    return Documents(_read_documents("--document", documents), question=question, instruction=instruction)


def _read_documents(argument: str, paths: Sequence[str]) -> dict[str, str]:
    """Return the texts of documents by their names: those of files, named files and folders of files."""
    from lens_mix.plain_text import read_text

    texts: dict[str, str] = {}
    for name, path in (found for given in paths for found in _find_documents(argument, given)):
        content = read_text(argument, path).strip()
        if not name.strip() or not content:
            raise ValueError(
                f"{argument}: expected NAME=FILE with a name and a text, got the name {name!r} and "
                f"{path}{'' if content else ', which is empty'}"
            )
        if name in texts:
            raise ValueError(
                f"{argument}: expected different names, got {name!r} twice; write another one, as in "
                f"'{name} 2={path}'"
            )
        texts[name] = content
    return texts


def _find_documents(argument: str, given: str) -> list[tuple[str, Path]]:
    """Return the names and paths of the documents that FILE, NAME=FILE or a folder is."""
    path = Path(given)
    if given and path.is_dir():
        return [(each.stem, each) for each in _list_documents(argument, path)]
    name, equals, place = given.partition("=")
    # The name of a file may contain an equals sign itself.
    return [(name, Path(place))] if equals and not path.exists() else [(path.stem, path)]


def _list_documents(argument: str, folder: Path) -> list[Path]:
    """Return the text files of a folder in the order of their names, and print which others it has."""
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    found = [each for each in entries if each.suffix.lower() in _DOCUMENT_ENDINGS and each.is_file()]
    others = [entry.name for entry in entries if entry not in found]
    shown = textwrap.shorten(", ".join(others), 200, placeholder=" ...") or "nothing"
    endings = " or ".join(_DOCUMENT_ENDINGS)
    if not found:
        raise ValueError(
            f"{argument}: expected a folder with files that end in {endings}, got {folder} with {shown}"
        )
    # A claim that rests on a file that was not read would seem to be from memory.
    if others:
        expected = f"expected files that end in {endings}"
        typer.echo(f"lens-mix: {argument}: not read in {folder}: {shown} ({expected})", err=True)
    return found


def _read_written(answer: str | None, answer_file: Path | None, generate: int | None) -> str | None:
    """Return what was written after a prompt, from an option or a file; None if the model writes it."""
    from lens_mix.plain_text import read_text

    options = {"--answer": answer, "--answer-file": answer_file, "--generate": generate}
    given = [option for option, value in options.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{', '.join(given[:2])}: expected one of the two, got both")
    written = answer if answer_file is None else read_text("--answer-file", answer_file).rstrip()
    if written is not None and not written.strip():
        raise ValueError(f"{given[0]}: expected what was written, got {written!r}")
    return written


def _read_verdicts(given: Sequence[str] | None) -> list[str]:
    """Return the verdicts that --fail-on names, without repetition; the default for None."""
    from lens_mix.arguments import check_choice
    from lens_mix.traces.claims import VERDICTS

    parts = [part for text in given or _DEFAULT_FAILING for part in text.split(",")]
    names = list(dict.fromkeys(" ".join(part.replace("-", " ").split()).lower() for part in parts))
    for name in names:
        check_choice("--fail-on", name, [*VERDICTS, "none"])
    if "none" in names and len(names) > 1:
        raise ValueError(f"--fail-on: expected none alone, got it with {', '.join(names)}")
    return [name for name in names if name != "none"]


def _check_trace(sources: str, out: Path | None) -> None:
    """Raise an error for an unknown unit of sources, or a page that cannot be written."""
    from lens_mix.arguments import check_choice
    from lens_mix.traces.sources import UNITS

    check_choice("sources", sources, [unit for unit in UNITS if unit != "given"])
    if out is not None:
        _check_writable("--out", out)


def _make_trace(model: str, prompt: Any, written: str | None, generate: int | None, **options: Any) -> Any:
    """Load a model, and return the trace of what was written, or of what it writes if that is None."""
    from lens_mix.traces.trace import trace

    length = None if written is not None else generate or _DEFAULT_GENERATED
    loaded = _load_for_text(model)
    return trace(loaded, prompt, answer=written, generate=length, progress=_progress(), **options)


def _show_page(traced: Any, out: Path | None, show: bool, is_text: bool) -> None:
    """Write and open the page of a trace, if wanted, and print its path, or advice about it below text."""
    page = traced.show() if out is not None or show else None
    written = page.save(out) if page is not None and out is not None else None
    opened = page.open() if page is not None and show else None
    for path in filter(None, (written, opened)):
        typer.echo(f"\nwrote the page of the trace: {path}", err=not is_text)
    if is_text and page is None:
        typer.echo("\n--open shows the page of the trace, --out page.html writes it")


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
    expected = f"MODEL: expected the name or the folder of a model that can be loaded, got {name!r}"
    # The hub's error about a folder that does not exist is about names of repositories.
    if name.startswith(("/", "./", "../", "~")) and not Path(name).expanduser().exists():
        raise ValueError(f"{expected}, which does not exist")
    # Importing torch takes seconds too, and no bar shows that.
    if _progress():
        typer.echo(f"loading {_name(name)} ...", err=True)
    try:
        return _load_unchecked(name)
    # Every exception is caught, because libraries raise errors of many types for an unknown name, a missing
    # network, a broken file or too little memory.
    except Exception as problem:
        raise ValueError(f"{expected}: {type(problem).__name__}: {problem}") from problem


def _load_for_text(name: str) -> Any:
    """Load a model that a prompt of text is given to."""
    from lens_mix._inputs.features import require_tokens

    model = _load(name)
    require_tokens(model, "MODEL")
    return model


def _load_unchecked(name: str) -> Any:
    if not _progress():
        from transformers.utils import logging

        logging.disable_progress_bar()
    try:
        from transformer_lens.model_bridge import TransformerBridge
    except ImportError:
        from transformer_lens import HookedTransformer

        return HookedTransformer.from_pretrained_no_processing(name)
    return TransformerBridge.boot_transformers(name)


if __name__ == "__main__":
    app()
