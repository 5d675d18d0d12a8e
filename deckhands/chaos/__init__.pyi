from .chaos import FAULTS as FAULTS, Chaos as Chaos, ChaosSpec as ChaosSpec
from .report import ChaosReport as ChaosReport, Fault as Fault
from .interruptions import interrupt_workers as interrupt_workers
from .undo_journal import UndoJournal as UndoJournal
