"""The recurrences of the reference and of the judge: against fractions by definition, and against the code of transformers."""

from fractions import Fraction

import numpy as np
import pytest

import kvref
from kvref.backend import ReferenceBackend
from kvref.errors import NotTruncatable
from kvref.recurrences import chunk_matrix, keep_inputs, short_convolution, step_matrix
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families import all_families
from kvref_conformance.families.recurrent.checks_checkpoints import LAST, match, prompt, serve
from kvref_conformance.families.recurrent.fixture import RecurrentFixture
from kvref_conformance.families.recurrent.recurrence import make_tokens, product_and_bound, states_after, zero_state
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.check_runner import CheckRunner, Failure, select_checks
from kvref_conformance.runner.options import Effort

CONFIG = all_families()["recurrent"].small | {"num_layers": 1}
RULES = pytest.mark.parametrize("delta_rule", [0, 1])


def fractions(array):
    return np.vectorize(lambda x: Fraction(float(x)), otypes=[object])(array)


def by_definition(matrix, keys, values, gates, delta_rule):
    """One head, in fractions: the two lines of RECUR-02, element by element."""
    for key, value, (decay, strength) in zip(*map(fractions, (keys, values, gates)), strict=True):
        matrix = decay * matrix
        read = key @ matrix
        matrix = matrix + strength * np.outer(key, value - read if delta_rule else value)
    return matrix


@RULES
@pytest.mark.parametrize("kind", ["whole", "real"])
def test_the_reference_and_the_judge_follow_the_definition(delta_rule, kind):
    config = CONFIG | {"delta_rule": delta_rule}
    rng = np.random.default_rng(delta_rule)
    first, then = (make_tokens(rng, config, 1, count, kind=kind) for count in (3, 9))
    (begun,) = states_after(zero_state(config), first, config)[-1]
    start = begun.matrix.astype(np.float32)
    (after,) = states_after((type(begun)(begun.inputs, start.astype(np.float64), 0 * begun.error),), then, config)[-1]
    keys, values, gates = (then[name][0] for name in ("keys", "values", "gates"))
    chunk = chunk_matrix(start, keys, values, gates[..., 0], gates[..., 1], bool(delta_rule))
    steps = start
    for at in range(len(keys)):
        steps = step_matrix(steps, keys[at], values[at], gates[at, :, 0], gates[at, :, 1], bool(delta_rule))
    for head in range(config["num_heads"]):
        exact = by_definition(fractions(start[head]), keys[:, head], values[:, head], gates[:, head], delta_rule)
        assert abs(after.matrix[head] - exact.astype(np.float64)).max() <= 1e-13 * (1 + abs(after.matrix[head]).max())
        for got in (chunk, steps):
            error = np.vectorize(lambda x: float(abs(x)))(fractions(got[head]) - exact)
            assert (error <= after.error[head]).all()
    assert (after.error == 0).all() == (kind == "whole")
    assert after.error.max() < 2e-3  # a bound that admits anything would pass as well


@RULES
def test_the_bound_is_far_below_the_effect_of_a_token(delta_rule):
    config = CONFIG | {"delta_rule": delta_rule}
    tokens = make_tokens(np.random.default_rng(5), config, 1, 12)
    whole, without = states_after(zero_state(config), tokens, config)[-1][0], states_after(
        zero_state(config), {name: each[:, :-1] for name, each in tokens.items()}, config)[-1][0]  # fmt: skip
    assert (abs(whole.matrix - without.matrix) > whole.error + without.error).mean() > 0.9


def test_products_are_bounded():
    tokens = make_tokens(np.random.default_rng(1), CONFIG, 1, 4)
    (state,) = states_after(zero_state(CONFIG), tokens, CONFIG)[-1]
    want, bound = product_and_bound(state, tokens["keys"][0])
    got = kvref.recurrences.apply_matrix(state.matrix.astype(np.float32), tokens["keys"][0])
    assert (abs(got - want) <= bound + 2**-24 * abs(want)).all()


def test_a_convolution_in_chunks_is_that_of_the_whole():
    rng = np.random.default_rng(0)
    inputs, weights = rng.integers(-8, 8, (11, 2, 3)).astype(np.float32), rng.integers(-8, 8, (4, 2, 3)).astype(np.float32)
    padded = np.concatenate([np.zeros((3, 2, 3), np.float32), inputs])
    want = np.stack([(padded[at : at + 4] * weights).sum(axis=0) for at in range(11)])
    for size in (1, 2, 5, 11):
        state, outputs = np.zeros((3, 2, 3), np.float32), []
        for start in range(0, 11, size):
            chunk = inputs[start : start + size]
            outputs.append(short_convolution(state, chunk, weights))
            state = keep_inputs(state, chunk)
        assert (np.concatenate(outputs) == want).all()
        assert (state == inputs[-3:]).all()


def test_a_truncation_that_is_refused_names_the_length():
    cache = kvref.RecurrentCache(kvref.RecurrentConfig(2, 1, 1, 1, 1, 1, 1))
    sequence = cache.create()
    cache.append(sequence, *(np.ones((1, 3, 1, width), np.float32) for width in (1, 1, 1, 2)))
    with pytest.raises(NotTruncatable, match="cannot truncate to 2: there is no checkpoint of this length"):
        cache.truncate(sequence, 2)


def test_the_model_evicts_a_checkpoint_for_a_sequence_that_begins_with_another_one():
    fixture = RecurrentFixture(Subject(OnBackend(ReferenceBackend()), np.random.default_rng(0), family="recurrent"), num_blocks=3)
    fixture.cache.drop(serve(fixture, prompt(fixture, 2)))
    fixture.cache.create()  # the last block without a checkpoint
    fixture.cache.begin([*prompt(fixture, 2), LAST])
    assert match(fixture, prompt(fixture, 1)) == 0  # judged by the model
    assert match(fixture, prompt(fixture, 2)) == 6


@pytest.mark.torch
def test_the_rule_of_transformers_is_within_the_bound():
    """The gated delta rule of transformers: its chunks for several tokens, its recurrence for one. SSD stays as it is."""
    import torch  # before the judge measures the time of a call
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

    class TransformersRule(kvref.RecurrentCache):
        def _update(self, matrix, keys, values, gates):
            if not self.config.delta_rule:
                return super()._update(matrix, keys, values, gates)
            arrays = [torch.from_numpy(np.ascontiguousarray(each))[None] for each in (keys, keys, values, gates, matrix)]
            rule = torch_recurrent_gated_delta_rule if len(keys) == 1 else torch_chunk_gated_delta_rule
            gates = {"g": arrays[3][..., 0].log(), "beta": arrays[3][..., 1]}
            _, after = rule(*arrays[:3], **gates, initial_state=arrays[4], output_final_state=True)
            return after[0].numpy()

    class Transformers(OnBackend):
        def recurrent(self, **config):
            return TransformersRule(kvref.RecurrentConfig(**config), self.backend)

    judge = CheckRunner(Transformers(ReferenceBackend()), Effort(timeout=60))
    chosen = [checks for clause in ("RECUR-02", "RECUR-03", "RECUR-09", "RECUR-15") for checks in select_checks(clause).values()]
    found = [judge.judge_check(check) for checks in chosen for check in checks if check.run]
    assert len(found) > 10
    assert [str(each.violation) for each in found if isinstance(each, Failure)] == []
