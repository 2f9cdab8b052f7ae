"""The inference service: one engine that samples, scores and takes new weights while it runs."""
