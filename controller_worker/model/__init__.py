"""One model call as a chain: question, permit, cache, batch, fallback, provider.

Start with: model_call.
"""
