"""Test that a process can map a model if it was forked while another thread mapped it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback

import pytest
import torch

import lens_mix as lm
from lens_mix._care.changes import Changes
from lens_mix._model.model import Lens
from lens_mix.experiments import pruned
from tests import tiny_models
from tests._care.test_state import state_of
from tests.matrix import case_of, slow

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here"),
]
# A child process that takes longer is killed.
SECONDS = 60
METHODS = ["attention", "value_zeroing", "attention_attribution"]


def succeeds_in_a_child(check):
    """Return whether a forked process ends, and `check()` is true in it."""
    child = os.fork()
    if child == 0:
        succeeds = False
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            succeeds = check()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0 if succeeds else 1)
    return os.waitpid(child, 0)[1] == 0


class Mapped:
    """A model, with the state and the map that a child process must find and compute."""

    def __init__(self, label):
        case = case_of(label)
        self.model = case.build()
        if case.refusal is not None:
            pytest.skip(case.refusal)
        for index, module in enumerate(self.model.modules()):
            module.training = index % 2 == 0
        for index, parameter in enumerate(self.model.parameters()):
            parameter.requires_grad_(index % 2 == 0)
        self.tokens = tiny_models.tokens(self.model, 1)
        self.expected = lm.run(self.model, self.tokens, METHODS)
        self.before = state_of(self.model)

    def is_well(self):
        after = state_of(self.model)
        alike = all(self.before[name] == after[name] for name in self.before if name != "weights")
        got = lm.run(self.model, self.tokens, METHODS)
        close = (torch.allclose(got[n].scores, self.expected[n].scores, atol=1e-5) for n in METHODS)
        return alike and all(close) and torch.is_grad_enabled()


@pytest.fixture
def mapped():
    return Mapped("bridge gpt2")


@pytest.mark.parametrize("count", [6, slow(25)])
@pytest.mark.parametrize("label", ["bridge gpt2", "HookedTransformer LN"])
def test_a_child_forked_at_any_moment_of_another_threads_run(label, count):
    mapped, stop = Mapped(label), threading.Event()

    def keep_mapping():
        while not stop.is_set():
            for name in METHODS:
                lm.run(mapped.model, mapped.tokens, name)

    other = threading.Thread(target=keep_mapping)
    other.start()
    try:
        failed = [moment for moment in range(count) if not succeeds_in_a_child(mapped.is_well)]
    finally:
        stop.set()
        other.join()
    assert not failed


@pytest.mark.parametrize("inside", [pruned, lambda model, heads: Lens(model).evaluation_mode(gradients=True)])
def test_a_child_forked_while_another_thread_has_the_model_open(mapped, inside):
    is_open, stop = threading.Event(), threading.Event()

    def keep_open():
        with inside(mapped.model, [(0, 0), (1, 1)]):
            mapped.model(mapped.tokens)
            is_open.set()
            stop.wait()

    other = threading.Thread(target=keep_open)
    other.start()
    is_open.wait()
    try:
        assert succeeds_in_a_child(mapped.is_well)
    finally:
        stop.set()
        other.join()
    assert mapped.is_well()


def test_a_child_forked_by_another_thread_than_the_main_one(mapped):
    """Check that the user's signal handlers, which wait in the main thread, are installed again."""
    before, results = signal.signal(signal.SIGUSR1, handled := lambda *_: None), []

    def check():
        return signal.getsignal(signal.SIGUSR1) is handled and mapped.is_well()

    try:
        with Lens(mapped.model).evaluation_mode():
            assert signal.getsignal(signal.SIGUSR1) is not handled
            other = threading.Thread(target=lambda: results.append(succeeds_in_a_child(check)))
            other.start()
            other.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert results == [True]


def test_a_child_keeps_what_the_thread_that_forked_it_has_open(mapped):
    with pruned(mapped.model, [(0, 0), (0, 1)]):
        logits = mapped.model(mapped.tokens)
        assert succeeds_in_a_child(lambda: torch.equal(mapped.model(mapped.tokens), logits))
    assert mapped.is_well()


def test_a_process_is_forked_between_changes():
    """Fork while another thread makes a change: the change is completed, and undone in the child."""
    changed, begun = [], threading.Event()

    def change():
        begun.set()
        changed.append("half")
        threading.Event().wait(0.3)
        changed.append("made")
        return changed.clear

    def enter():
        with Changes([change]):
            stop.wait()

    stop = threading.Event()
    other = threading.Thread(target=enter)
    other.start()
    begun.wait()
    try:
        assert succeeds_in_a_child(lambda: not changed)
        assert changed == ["half", "made"]
    finally:
        stop.set()
        other.join()


def _map(mapped, results):
    results.put(mapped.is_well())


def test_processes_of_multiprocessing_and_workers_of_a_data_loader(mapped):
    stop = threading.Event()

    def keep_mapping():
        while not stop.is_set():
            lm.run(mapped.model, mapped.tokens, "value_zeroing", engine="hooks")

    class Maps(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            torch.set_num_threads(1)
            return lm.run(mapped.model, mapped.tokens, "attention").scores

    other = threading.Thread(target=keep_mapping)
    other.start()
    try:
        fork = multiprocessing.get_context("fork")
        results = fork.Queue()
        process = fork.Process(target=_map, args=[mapped, results], daemon=True)
        process.start()
        assert results.get(timeout=SECONDS)
        process.join()
        loader = torch.utils.data.DataLoader(
            Maps(), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=SECONDS
        )
        for scores in loader:
            torch.testing.assert_close(scores, mapped.expected["attention"].scores)
    finally:
        stop.set()
        other.join()
