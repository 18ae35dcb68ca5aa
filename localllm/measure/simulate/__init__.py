"""The real engine on a virtual clock: a runner that computes nothing and takes the time that a cost model says."""
