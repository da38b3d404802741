"""What replication costs for some number of nodes, on paper: the arithmetic behind docs/scaling.md, with figures that were measured.

`python -m bench.scaling` prints the table. It measures nothing; bench/replication.py does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """Figures of bench/replication.py, as straight lines through documents of 75 and of 527 tokens.

    Attributes:
        stored_bytes, stored_bytes_per_token: A message in the stream, headers included.
        delivery_bytes: What a delivery has beyond that: the subject to answer to, the protocol, the acknowledgement.
        take_us, take_us_per_token: CPU of a service for a document that it takes, its index included.
        nats_us: CPU of nats-server for one delivery.
        taken_per_s: Documents that a service takes in a second while it does little else.
    """

    stored_bytes: float = 350.0
    stored_bytes_per_token: float = 1.5
    delivery_bytes: float = 200.0
    take_us: float = 153.0
    take_us_per_token: float = 0.23
    nats_us: float = 16.0
    taken_per_s: float = 3400.0


@dataclass(frozen=True)
class Load:
    """What nodes do.

    Attributes:
        nodes: Services that share one stream.
        documents_per_s: Documents that each commits.
        tokens: Tokens of a document.
        quota_tokens: What a corpus holds.
        stream_bytes: Size of the stream.
    """

    nodes: int
    documents_per_s: float = 2.0
    tokens: float = 500.0
    quota_tokens: float = 4_194_304
    stream_bytes: float = 2**30


@dataclass(frozen=True)
class Cost:
    """What comes of it.

    Attributes:
        documents_per_s: Of all nodes, which is what each takes.
        node_in_bytes_per_s: Into each node; a node is sent its own documents too.
        nats_out_bytes_per_s: Out of NATS, all servers together.
        node_cores: CPU of each service for what it takes.
        nats_cores: CPU of NATS, all servers together.
        corpus_s: Time after which a corpus has forgotten a document.
        stream_s: Time that the stream keeps one.
        begin_s: Time in which a fresh node fills its quota.
    """

    documents_per_s: float
    node_in_bytes_per_s: float
    nats_out_bytes_per_s: float
    node_cores: float
    nats_cores: float
    corpus_s: float
    stream_s: float
    begin_s: float


def cost(load: Load, measured: Measured | None = None) -> Cost:
    """The cost of a load."""
    m = measured or Measured()
    documents = load.nodes * load.documents_per_s
    stored = m.stored_bytes + m.stored_bytes_per_token * load.tokens
    into_node = documents * (stored + m.delivery_bytes)
    return Cost(
        documents_per_s=documents,
        node_in_bytes_per_s=into_node,
        nats_out_bytes_per_s=load.nodes * into_node,
        node_cores=documents * (m.take_us + m.take_us_per_token * load.tokens) / 1e6,
        nats_cores=load.nodes * documents * m.nats_us / 1e6,
        corpus_s=load.quota_tokens / (documents * load.tokens),
        stream_s=load.stream_bytes / (documents * stored),
        begin_s=load.quota_tokens / load.tokens / m.taken_per_s,
    )


NODES = (4, 16, 32, 64, 256, 1000)


def table() -> str:
    """The table of docs/scaling.md."""
    lines = [
        "| nodes | documents/s | into a node | out of NATS | CPU of a node | CPU of NATS | the corpus holds | the stream holds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for nodes in NODES:
        c = cost(Load(nodes))
        cells = (
            f"{nodes:,}",
            f"{c.documents_per_s:,.0f}",
            f"{c.node_in_bytes_per_s / 1e6:.2f} MB/s",
            f"{c.nats_out_bytes_per_s / 1e6:,.2f} MB/s",
            f"{100 * c.node_cores:.1f} %",
            f"{c.nats_cores:,.3f} cores",
            _time(c.corpus_s),
            _time(c.stream_s),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 5400 else f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.1f} s"


if __name__ == "__main__":
    print(table(), end="")
