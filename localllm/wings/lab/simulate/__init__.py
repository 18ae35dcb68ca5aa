"""The real engine on a virtual clock, with a runner that computes nothing and takes the time of a cost model."""
