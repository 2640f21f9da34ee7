"""A decoder of one layer. Shapes: T tokens, C channels, B sampled positions."""

from dovetail.core.interfaces import Model, ModelSource, ModelSpec
from dovetail.core.layers import LMHead, VocabParallelEmbedding, VocabTable, dummy_weights, load_weights

from dovetail_mine.block import Block


class Mine(Block, Model):
    def __init__(self, config, build):
        super().__init__(config, build)
        self.table = VocabTable("embed", build, build.spec.vocab, build.spec.hidden, logits=True)
        self.embedding, self.head = VocabParallelEmbedding(self.table), LMHead(self.table, build)

    @classmethod
    def spec(cls, config):
        hidden = config.hidden
        return ModelSpec("Mine", config.vocab, 1, hidden, 4, 4, hidden // 4, 2 * hidden, 512, "float32", tied=True)

    @classmethod
    def source(cls, config):
        return ModelSource(None, dummy=True)

    def weights(self):
        return [weight for layer in (self.table, *self.layers) for weight in layer.weights()]

    def load(self, weights):
        load_weights(self.weights(), weights)
        self.finish()

    def init_dummy(self, seed):
        self.load(dummy_weights(self.weights(), seed, self.build.dtype, self.build.device))

    def embed(self, tokens_T, extra_TC=None, mask_T=None):
        embeds_TC = self.embedding(tokens_T)
        return embeds_TC if mask_T is None else extra_TC.where(mask_T[:, None], embeds_TC)

    def logits(self, states_BC):
        return self.head(states_BC)
