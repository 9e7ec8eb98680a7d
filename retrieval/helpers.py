"""What the bundled plugins share, without a promise to other plugins: any version may change it.

Authors of other plugins import `retrieval.plugin`. Each name is imported on first use, as there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrieval.base.lazy import lazy_names as lazy_names

if TYPE_CHECKING:  # `lazy_names` reads this list
    from retrieval.base.csv_table import (
        CsvTable as CsvTable,
        is_missing_text as is_missing_text,
        typed as typed,
    )
    from retrieval.base.files import cache_folder as cache_folder, write_bytes as write_bytes
    from retrieval.base.lazy import lazy as lazy, lazy_names as lazy_names
    from retrieval.base.photo_files import address_of as address_of, path_in as path_in
    from retrieval.base.progress import Meter as Meter
    from retrieval.base.strict_json import strict_loads as strict_loads
    from retrieval.data.datasets import Box as Box, usable_dataset as usable_dataset
    from retrieval.data.foreign_datasets import as_dataset as as_dataset
    from retrieval.data.image_archives import (
        Count as Count,
        Counts as Counts,
        differing as differing,
        read_idx as read_idx,
        read_records as read_records,
    )
    from retrieval.data.splits import (
        ROLES as ROLES,
        SIDES as SIDES,
        SPLITS as SPLITS,
        sides as sides,
    )
    from retrieval.data.unreadable_images import (
        ADVICE as ADVICE,
        report_left_out as report_left_out,
        skip_unreadable as skip_unreadable,
    )
    from retrieval.errors import refuse as refuse, some as some
    from retrieval.host.factory import check_parameters as check_parameters
    from retrieval.images.preprocessing import to_mode as to_mode, to_png as to_png
    from retrieval.model.contracts import PooledHits as PooledHits
    from retrieval.model.labels import read_labels as read_labels
    from retrieval.model.loss import (
        Pairs as Pairs,
        as_given as as_given,
        item_losses as item_losses,
        listed_pairs as listed_pairs,
        losses_of as losses_of,
        pair_views as pair_views,
        pairs_by_round as pairs_by_round,
        reduced_loss as reduced_loss,
    )
    from retrieval.model.loss_division import (
        Rows as Rows,
        Sums as Sums,
        first_row as first_row,
        summed as summed,
    )
    from retrieval.model.metric_learner import (
        Seeded as Seeded,
        deviations as deviations,
        refuse_overflow as refuse_overflow,
    )
    from retrieval.model.model import full_precision as full_precision
    from retrieval.model.pretrained_network import (
        Network as Network,
        fetch as fetch,
        hub_from_cache_when_away as hub_from_cache_when_away,
        interpolation as interpolation,
        reach as reach,
        tried as tried,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
