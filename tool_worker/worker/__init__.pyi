from .consumer import ToolConsumer as ToolConsumer
