"""Answers on stdout."""

from dovetail import LLM, SamplingParams
from dovetail.core.interfaces import App

from dovetail_mine.config import MineConfig


class Mine(App):
    config: MineConfig

    def run(self, composition, prompts):
        """Return the exit code."""
        params = SamplingParams(temperature=0.0, max_tokens=self.config.max_tokens)
        with LLM(composition=composition) as llm:
            for result in llm.generate(list(prompts) or [self.config.prompt], params):
                print(result.prompt + result.text)
        return 0
