from .stub_engine import StubEngine as StubEngine, serve_stub as serve_stub
