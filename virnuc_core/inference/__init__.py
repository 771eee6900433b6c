"""From a plan to shards: devices, the engine, and a process for each lane."""

import os
from typing import Final

# Settings of CPU libraries, read at the first matrix product.
CPU_LIBRARIES: Final = {
    # Otherwise MKL's rounding depends on memory alignment and thread count, and a run resumed with fewer cores would not
    # be byte-identical.
    "MKL_CBWR": "AUTO",
    # By default oneDNN caches primitives for 1,024 shapes: nearly 1 GB for batches of different sizes. Layers of one
    # batch share theirs.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    # Torch's own cache of these for fused products otherwise grows by 1.6 MB per shard.
    "LRU_CACHE_CAPACITY": "64",
}
# In every process: lanes in the main process are byte-identical, too, and so are tables that are compared later.
for _name, _value in CPU_LIBRARIES.items():
    os.environ.setdefault(_name, _value)
