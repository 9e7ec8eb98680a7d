"""Search that learns from feedback: its learners, the gate, and the worker's commands."""

from __future__ import annotations

from retrieval.host.hookspecs import Commands, Factories, hookimpl


@hookimpl
def retrieval_learners() -> Factories:
    """Small changes to a metric from triplets of feedback, in closed form."""
    return {
        "diagonal": "retrieval_feedback.learners:Diagonal",
        "low_rank": "retrieval_feedback.learners:LowRank",
    }


@hookimpl
def retrieval_commands(app: Commands) -> None:
    """`retrieval feedback` and `retrieval learn`."""
    app.add_location("feedback", "retrieval_feedback.commands_feedback:feedback")
    app.add_location("learn", "retrieval_feedback.commands_learn:learn")
