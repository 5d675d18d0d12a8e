from .consumer import ControllerConsumer as ControllerConsumer
