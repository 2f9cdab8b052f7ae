"""What the real model's report says, from figures that are known."""

import pytest

from benchmarks.real.__main__ import _interval, _of_texts, in_words


def test_the_gain_has_the_bootstraps_interval_over_tasks() -> None:
    low, high = _interval([0.0] * 50 + [1.0] * 50)
    assert (low, high) == pytest.approx((0.4, 0.6), abs=0.02), "1.96 standard errors of .05"
    assert _interval([0.5] * 10) == (0.5, 0.5)


def test_words_and_repeated_runs_of_three_are_counted() -> None:
    # Of "the cat sat" and the rest, 4 runs, one was there before.
    assert _of_texts(["The cat sat the cat sat", "One two"]) == {
        "mean_words": 4.0,
        "repeated_3grams": 0.125,
    }


def test_a_person_reads_what_was_learned() -> None:
    text = in_words(
        {
            "heldout": {
                "before_sampled": 0.1,
                "after_sampled": 0.5,
                "before_greedy": 0.2,
                "after_greedy": 0.6,
            },
            "gain": 0.4,
            "gain_interval": [0.31, 0.49],
            "before": {"mean_words": 20.0, "repeated_3grams": 0.01},
            "after": {"mean_words": 15.0, "repeated_3grams": 0.02},
            "kl_to_start": 0.3,
            "max_logprob_difference": 4e-5,
            "num_train_steps": 20,
            "audit": [],
            "training_wall_s": 600.0,
            "training_cores_used": 0.9,
            "by_kind": {"detectable_format:title": {"tasks": 17, "before": 0.1, "after": 0.9}},
            "answers": [{"prompt": "Describe ink.", "before": "Ink", "after": "Ink is black."}],
        }
    )
    assert "held-out reward, sampled         0.100 ->   0.500" in text
    assert "0.310 to 0.490 at 95%" in text
    assert "detectable_format:title" in text
    assert "after   'Ink is black.'" in text
