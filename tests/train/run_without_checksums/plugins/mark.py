"""A plugin file of a run that an earlier version wrote."""

from pytorch_metric_learning import losses
from retrieval.plugin import hookimpl


def contrastive(margin: float = 1.0) -> losses.ContrastiveLoss:
    """The contrastive loss.

    Args:
        margin: distance beyond which negatives are far enough.
    """
    return losses.ContrastiveLoss(neg_margin=margin)


@hookimpl
def retrieval_losses():
    return {"contrastive": contrastive}
