"""OpenHands' SDK at the same work, under an interpreter of its own."""
