"""The bench: workloads, driver, metrics, probes, results and supervision of measured runs."""
