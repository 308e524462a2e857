"""Servers with an interface like OpenAI's, which have loaded a canary: judged by what they say, over HTTP."""
