"""Images: formats, decoding, colours, preprocessing, and finding them below a folder."""

import warnings


def ignore_pillow_warnings() -> None:
    """Ignore Pillow's warnings: broken metadata changes no pixel, and `Limits` is stricter on size.

    The filter applies to the whole process, because changing it around each image would need a
    lock.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")


ignore_pillow_warnings()
