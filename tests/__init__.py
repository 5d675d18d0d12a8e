"""The tests of Deckhands, by kind: unit, conformance, integration, replay, faults, security, scale."""
