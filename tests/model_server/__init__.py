"""A local model provider for tests and benchmarks: a real HTTP server process, scripted, faulty on demand.

It speaks OpenAI's Chat Completions and Responses and Anthropic's Messages, streaming or not, checks what a provider checks, says the
turns of a script (docs/models.md#scripted-models), and misbehaves by plan (faults.py).

    python -m tests.model_server --port 0 --builtin bash:10 --latency 1.0

Holds: the first line it prints is its port; a reply depends only on the request's history, so it needs no session.
Does not: put `{workspace}` into arguments, which no provider could know: scripts for it use relative paths.
"""
