"""One rank in this process. SlotLedger refuses invalid plans before a kernel runs."""

from dovetail.core.interfaces import Executor
from dovetail.core.parallel.slot_ledger import SlotLedger
from dovetail.core.worker.loader import load_rank


class Mine(Executor):
    def __init__(self, config, composition):
        self.config, self.composition = config, composition
        self.runner, self.ledger, self.pending = None, SlotLedger(), 0

    def start(self, progress):
        rank = load_rank(self.composition, progress)
        self.runner = rank.bind(rank.info.num_pages)
        return rank.info

    def submit(self, plan, blobs):
        self.ledger.apply(plan)
        if self.config.log:
            print(f"step {plan.step}: {plan.num_tokens} tokens", flush=True)
        self.runner.execute(plan, blobs)
        self.pending += 1

    def complete(self, late):
        self.ledger.complete(late)
        self.runner.complete(late)

    def drafted(self):
        self.ledger.check_drafted()
        return self.runner.drafted()

    def collect(self):
        self.ledger.check_collect(self.pending)
        self.pending -= 1
        return self.runner.collect()

    def shutdown(self):
        if self.runner is not None:
            self.runner.close()
