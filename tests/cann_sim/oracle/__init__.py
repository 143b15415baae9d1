"""The operators' own unit tests as the measure of the simulator's limits; see `report`."""
