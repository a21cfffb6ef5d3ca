"""`raywire chaos`: faults in a running server, by a plan that can be repeated."""
