"""LocalExecutor keeps the Executor's promises: order, overlap, and steps that fail."""

import numpy as np
import pytest
from step_driver import Driver

from detour.errors import CheckpointError, ConfigError
from detour.worker.executors import LocalExecutor
from detour.worker.settings import WorkerSettings


def settings(folder, **changes) -> WorkerSettings:
    values = {"device": "cpu", "dtype": "float32", "threads": 1, "progress": False}
    values |= {"page_size": 8, "max_slots": 4, "max_total_tokens": 512, "max_step_tokens": 64}
    return WorkerSettings(folder, **{**values, **changes})


@pytest.fixture
def executor(tiny_folder):
    made = LocalExecutor(settings(tiny_folder))
    yield made
    made.close()


def test_geometry_and_facts(executor):
    geometry = executor.geometry
    assert (geometry.page_size, geometry.max_slots, geometry.num_pages) == (8, 4, 65)
    assert geometry.context_length == 256
    assert (
        geometry.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    )  # layers, k and v, heads, width, float32
    assert geometry.eos_ids
    facts = executor.facts
    assert (facts.dtype, facts.device, facts.threads) == ("float32", "cpu", 1)
    assert facts.kv_bytes == 65 * 8 * geometry.kv_bytes_per_token
    assert facts.weight_bytes > 4 * 2 * 320 * 32  # embedding and head at least
    assert set(facts.backends) >= {"gemm", "attention", "rms_norm", "rope", "draw"}


def test_two_steps_out_at_once_come_back_in_order(executor):
    driver = Driver(executor._worker.runner)
    driver.admit(0, list(range(20)))
    executor.submit(driver.plan([(0, 20)]))
    executor.submit(driver.plan([(0, 1)], unknown=True))
    first, second = executor.collect(), executor.collect()
    assert (first.step, second.step) == (0, 1)
    driver.admit(1, [*range(20), int(first.tokens[0])])
    executor.submit(driver.plan([(1, 21)]))
    assert executor.collect().tokens.tolist() == second.tokens.tolist()


def test_a_failed_step_and_those_behind_it_have_not_happened(executor):
    driver = Driver(executor._worker.runner)
    driver.admit(0, [1, 2, 3])
    driver.admit(1, [4, 5, 6, 7])
    plan = driver.plan([(0, 3), (1, 4)])
    broken = plan.__class__(
        **{**vars(plan), "tokens": np.array([1, 2, 9999, 4, 5, 6, 7], np.int32)}
    )
    executor.submit(broken)
    executor.submit(driver.plan([(0, 1), (1, 1)], unknown=True))
    with pytest.raises(IndexError):
        executor.collect()
    executor.submit(plan)
    assert executor.collect().finite.all()


def test_closing_twice(tiny_folder):
    executor = LocalExecutor(settings(tiny_folder))
    executor.close()
    executor.close()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"context_length": 300}, ConfigError, ("300", "256")),
        ({"device": "tpu"}, ConfigError, ("tpu",)),
        ({"device": "cuda:77"}, ConfigError, ("cuda:77",)),
        ({"dtype": "int3"}, ConfigError, ("int3",)),
        ({"kv_dtype": "int3"}, ConfigError, ("int3",)),
        ({"memory_fraction": 1e-9, "max_total_tokens": 0}, ConfigError, ("KV cache",)),
        ({"overrides": {"model_type": "abacus"}}, CheckpointError, ("abacus", "llama")),
        ({"overrides": {"num_hidden_layers": 3}}, CheckpointError, ("model.layers.2.",)),
        ({"overrides": {"num_hidden_layers": 1}}, CheckpointError, ("model.layers.1.",)),
        ({"overrides": {"intermediate_size": 56}}, CheckpointError, ("[48, 32]", "[56, 32]")),
    ],
)
def test_what_cannot_be_served_is_said_in_a_sentence(tiny_folder, changes, error, words):
    with pytest.raises(error) as caught:
        LocalExecutor(settings(tiny_folder, **changes))
    assert all(word in caught.value.message for word in words), caught.value.message


def test_a_context_that_memory_cannot_hold_is_cut(tiny_folder):
    executor = LocalExecutor(settings(tiny_folder, max_total_tokens=64))
    assert executor.geometry.context_length == 64
    executor.close()


def test_dummy_weights_need_a_configuration_alone_and_depend_on_the_seed(tiny_folder, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())

    def tokens(seed: int) -> list[int]:
        executor = LocalExecutor(settings(tmp_path, load_format="dummy", seed=seed))
        driver = Driver(executor._worker.runner)
        driver.admit(0, list(range(30)))
        result = driver.run([(0, 30)])
        assert result.finite.all()
        for _ in range(5):
            driver.run([(0, 1)])
        executor.close()
        return driver.sequences[0].known[30:]

    assert tokens(1) == tokens(1) != tokens(2)
