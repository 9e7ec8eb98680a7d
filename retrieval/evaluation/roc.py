"""The picture of ROC curves."""

from __future__ import annotations

import io
from collections.abc import Mapping

from retrieval.evaluation.verification import Roc


def draw_roc(curves: Mapping[str, tuple[Roc, float]]) -> bytes:
    """Return ROC curves as SVG, the same bytes for the same curves.

    Args:
        curves: by contestant: the curve, and its AUC for the legend.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "retrieval", "svg.fonttype": "none"}):
        figure = Figure(figsize=(5.2, 5.0), layout="constrained")
        FigureCanvasSVG(figure)
        axis = figure.subplots()
        styles = ("-", "--", ":", "-.")  # told apart without colours, too
        for i, (name, (roc, auc)) in enumerate(curves.items()):
            axis.plot(roc.far, roc.tar, linestyle=styles[i % len(styles)], label=f"{name} (AUC {auc:.4f})")
        axis.plot(
            [0, 1], [1, 0], color="0.8", linewidth=0.8, zorder=0
        )  # crosses each curve at its equal error rate
        axis.set(
            xlabel="false accept rate (FAR)", ylabel="true accept rate (TAR)", xlim=(-0.01, 1.01), ylim=(-0.01, 1.01)
        )  # fmt: skip
        axis.set_aspect("equal")
        axis.legend(loc="lower right", frameon=False)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
