"""Faulty variants of a correct component, and the check that a contract suite rejects them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from dovetail.core.testing.suite import failures

ERRORS = {
    # A cache, scheduler or drafter that loses count is refused by the bookkeeping around it.
    "test_a_window_group_that_holds_one_sequence": "ValueError: cannot publish",
    "test_peek_is_pure": "ValueError: sequence .* is already known",
    "test_state_machine": "KeyError",
    "test_every_request_gets_its_own_output": r"\w+Error: .*launched nothing|ValueError: sequence .* already known",
    "test_every_preemption_is_worth_it": "PluginError: ",
    "test_no_request_starves": r"\w+Error: .*launched nothing",
    "test_rows_with_a_grammar": r"\w+Error: .*launched nothing|AttributeError: 'list' object",
    "test_sequences_wait_for_their_adapters": r"\w+Error: .*(launched nothing|without acquiring)",
    "test_what_can_never_run_is_rejected": r"\w+Error: .*launched nothing",
    # A grammar that follows another text refuses the right one.
    "test_forks_are_independent": "RequestError: grammar: .* doesn't satisfy the grammar",
    "test_other_texts_are_not_allowed": "RequestError: grammar: .* doesn't satisfy the grammar",
    # The component itself raises where it must not.
    "test_a_wrong_grammar_is_refused_with_its_reason": "KeyError",
    "test_adapters_come_and_go_in_order_with_plans": "KeyError",
    "test_any_number_may_be_zero_or_large": "ZeroDivisionError",
    "test_checkpoint_may_have_another_dtype": "RuntimeError: The expanded size",
    "test_chunks_do_not_matter": "IndexError",
    "test_close_is_idempotent": "AttributeError: '(ClosesOnce|ClosesWhatIsOpen)'",
    "test_collecting_what_was_not_submitted_is_a_clear_error": "KeyError",
    "test_contexts_of_several_steps_live_at_once": "IndexError",
    "test_equals_the_loop": "IndexError",
    "test_reading_in_a_separate_thread": "RequestError: adapter: .* has no adapter_config.json",
    "test_every_expert_has_a_slot": r"ConfigError: .*(no rank has|has) expert",
    "test_balanced_layouts_have_every_expert": r"ConfigError: .*(no rank has expert|slots, and it returned)",
    "test_emits_the_formats_asked_for": "KeyError: .* was not emitted",
    "test_attend_mla_emits_the_formats_asked_for": "KeyError: .* was not emitted",
    "test_it_accepts_what_it_serves": "RequestError: presence_penalty|ValidationError",
    "test_it_refuses_a_model_in_bind_or_predicts": "ConfigError: .* cannot be predicted",
    "test_kv_dtypes": "IndexError: too many indices",
    "test_nothing_is_lost": "ValueError: this is no call",
    "test_plans_on_the_host_without_pools": "KeyError",
    "test_rows_sample_what_their_masks_allow": "IndexError",
    "test_shutdown_is_idempotent": "AttributeError: 'NeedsAStartToShutDown'",
    "test_spec_comes_from_config_json": "KeyError",
    "test_texts_of_the_grammar_are_calls": "KeyError",
    "test_wants_is_pure": "AttributeError: 'NeedsStateToWant'",
}
"""Test of a suite -> beginning of "Type: message" of an error with which it rejects a fault, if not an assertion."""


def variant(base: type, name: str, **members: Any) -> Any:
    """Subclass `base` with other methods or attributes."""
    return type(name, (base,), members)


def suite(contract: type, **members: Any) -> Any:
    """Instance of a contract suite with the hooks that it asks for."""
    return variant(contract, "Suite", **members)()


def each(broken: Mapping[str, Iterable[type]]) -> pytest.MarkDecorator:
    """Parametrize a test with (faulty class, name of the contract's test that must reject it)."""
    rows = [(fault, test) for test, faults in broken.items() for fault in faults]
    return pytest.mark.parametrize(("broken", "test"), rows, ids=[fault.__name__ for fault, _ in rows])


def rejection(suite: object, test: str) -> str:
    """Return the message with which the suite's test of this name fails; "" if it passes."""
    return str(_failure(suite, test) or "")


def rejects(suite: object, test: str) -> bool:
    """Whether the suite's test of this name fails, by an assertion or by the error that ERRORS expects; the suite's
    other tests do not run."""
    failure = _failure(suite, test)
    if failure is None or isinstance(failure, AssertionError | pytest.fail.Exception):
        return failure is not None
    return re.match(ERRORS.get(test, "none"), f"{type(failure).__name__}: {failure}") is not None


def _failure(suite: object, test: str) -> BaseException | None:
    return failures(suite, skip=tuple(name for name in dir(suite) if name != test)).get(test)
