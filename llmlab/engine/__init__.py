"""The engine: requests, scheduler, runner, and the step loop that joins them."""
