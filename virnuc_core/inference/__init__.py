"""From a plan to shards: devices, the engine, and a process for each lane."""
