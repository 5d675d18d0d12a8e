"""OpenHands' SDK at the same work, under a separate interpreter."""
