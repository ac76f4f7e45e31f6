"""A downsampled event log keeps the essential events."""

from __future__ import annotations

from xsake.observe import events, excerpt, sinks


def step(number):
    return events.TrainStep(
        step=number,
        loss_nats=1.0,
        learning_rate=0.1,
        gradient_norm=1.0,
        skipped_steps=0,
        density_ratio=1.0,
        tokens_seen=number,
        step_seconds=1.0,
        tokens_per_second=1.0,
    )


def test_an_excerpt_keeps_every_nth_step_and_steps_with_other_events(tmp_path):
    logged = [step(number) for number in range(1, 24)]
    saved = events.CheckpointSaved(step=15, path="checkpoints/15")
    evaluated = events.Evaluated(
        step=15, file="a", data_hash="", loss_nats=1.0, perplexity=2.7, targets=1, density_ratio=1.0
    )
    stopped = events.Stopped(step=23, reason="finished")
    logged[15:15] = [saved, evaluated]
    lines = [event.to_json() for event in (*logged, stopped)]
    (tmp_path / "events.jsonl").write_text("".join(line + "\n" for line in lines))
    excerpt.write_excerpt(tmp_path, tmp_path / "few.jsonl", 10)
    few = sinks.read(tmp_path / "few.jsonl")
    assert [event.step for event in few] == [1, 11, 15, 15, 23, 23]
    assert few[3] == evaluated
    assert few[-1] == stopped
