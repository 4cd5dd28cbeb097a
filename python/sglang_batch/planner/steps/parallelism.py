"""How a model is spread over devices."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ConfigError


@dataclass(frozen=True, slots=True, order=True)
class Parallelism:
    """The devices of all replicas, by SGLang's options.

    tp: ``--tp-size``, devices of a stage.
    pp: ``--pp-size``, stages.
    replicas: ``--dp-size``, engines that have nothing in common.
    attention_ranks: ``--attn-dp-size``, parts of the ``tp`` devices with requests of
        their own. Feed-forward networks work on the tokens of all.
    ep: ``--ep-size``, parts of the ``tp`` devices with experts of their own.

    Raises:
        ConfigError: a number is below 1, or ``attention_ranks`` or ``ep`` does not divide
            ``tp``.
    """

    tp: int = 1
    pp: int = 1
    replicas: int = 1
    attention_ranks: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "replicas", "attention_ranks", "ep"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"{name}={value!r} must be a whole number of 1 or more."
                )
        for name in ("attention_ranks", "ep"):
            if self.tp % getattr(self, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)} must divide tp={self.tp}."
                )

    @property
    def devices(self) -> int:
        """Of all replicas."""
        return self.tp * self.pp * self.replicas

    @property
    def attention_tp(self) -> int:
        """Devices that share one request's attention."""
        return self.tp // self.attention_ranks

    @property
    def arguments(self) -> list[str]:
        """SGLang's options, those at their defaults left out."""
        options = {
            "--tp-size": self.tp,
            "--pp-size": self.pp,
            "--dp-size": self.replicas,
            "--attn-dp-size": self.attention_ranks,
            "--ep-size": self.ep,
        }
        return [word for name, x in options.items() if x > 1 for word in (name, str(x))]

    def __str__(self) -> str:
        parts = {
            "TP": self.tp,
            "PP": self.pp,
            "DP": self.replicas,
            "attention DP": self.attention_ranks,
            "EP": self.ep,
        }
        shown = [f"{name}{n}" for name, n in parts.items() if n > 1]
        return " ".join(shown).replace("attention DP", "attention-DP") or "TP1"
