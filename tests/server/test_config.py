"""Configuration: flags over environment over file over defaults; errors name the setting; the page is made from the fields."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from draftd.drafter.corpus_config import CorpusConfig
from draftd.drafter.params import DraftParams
from draftd.drafter.shm import default_root
from draftd.server.config import ConfigError, ServerConfig, load_config, parse_address
from draftd.server.config_docs import markdown
from draftd.server.service import corpus_config
from tests.server.harness import draftd

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "draftd.toml"
    file.write_text("max_k = 10\nmax_rows = 20\nmax_length = 30\ndraft_k = 8\n")
    monkeypatch.setenv("DRAFTD_MAX_ROWS", "21")
    monkeypatch.setenv("DRAFTD_MAX_LENGTH", "31")
    loaded = load_config({"max_length": 32, "max_batch": None}, file)
    config = loaded.config
    assert (config.max_k, config.max_rows, config.max_length, config.max_batch) == (10, 21, 32, 1024)
    assert [loaded.sources[name] for name in ("max_k", "max_rows", "max_length", "max_batch")] == [
        "file",
        "environment",
        "flag",
        "default",
    ]


def test_command_shows_values_with_their_sources(tmp_path: Path) -> None:
    file = tmp_path / "draftd.toml"
    file.write_text("lease_ms = 5000\n")
    result = draftd("config", "--config", str(file), "--max-k", "32", "--json", DRAFTD_LOG_LEVEL="debug")
    assert result.returncode == 0, result.stderr
    values = json.loads(result.stdout)
    assert set(values) == set(ServerConfig.model_fields)
    assert values["lease_ms"] == {"value": 5000, "source": "file"}
    assert values["log_level"] == {"value": "debug", "source": "environment"}
    assert values["max_k"] == {"value": 32, "source": "flag"}
    assert values["max_rows"] == {"value": 1024, "source": "default"}
    table = draftd("config", "--config", str(file), XDG_RUNTIME_DIR="/run/user/7").stdout
    assert "/run/user/7/draftd.sock" in table
    assert "file" in next(line for line in table.splitlines() if line.startswith("lease_ms"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"max_k": 65}, "max_k (from flag)"),
        ({"max_k": "many"}, "max_k (from flag)"),
        ({"lease_ms": 0}, "lease_ms (from flag)"),
        ({"log_format": "xml"}, "log_format (from flag)"),
        ({"listen": "127.0.0.1:1"}, "needs tls_cert and tls_key, or insecure"),
        ({"listen": "127.0.0.1:1", "tls_cert": "c"}, "needs tls_cert and tls_key"),
        ({"listen": "no-port", "insecure": True}, "is not host:port"),
        ({"http": "1.2.3.4:70000"}, "is not host:port"),
        ({"device": "gpu"}, "device (from flag): 'gpu' is not known; it must be cpu, cuda, cuda:N, or several cuda:N with commas"),
        ({"socket": "off"}, "no gRPC endpoint"),
        ({"socket": "/" + "x" * 100}, "more than 100 bytes"),
        ({"max_k": 8}, "draft_k: 16 is above max_k=8"),
        ({"depth": 32}, "draft_max_depth: 64 is above depth=32"),
        ({"namespace_quotas": "a=4095"}, "namespace_quotas: 'a=4095' is not pattern=tokens with 4096 to 268435456 tokens"),
        ({"namespace_quotas": "a"}, "namespace_quotas: 'a' is not pattern=tokens"),
        ({"namespace_quotas": "b=8192, =8192"}, "namespace_quotas: '=8192' is not pattern=tokens"),
    ],
)
def test_error_names_the_setting(flags: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(flags)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"), [("max_q = 1", "unknown setting 'max_q'"), ("max_k = ", "draftd.toml"), ("max_k = 0", "from file")]
)
def test_error_in_a_file(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "draftd.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config({}, file)
    assert said in str(error.value)


def test_command_line_error_is_one_line_of_usage(tmp_path: Path) -> None:
    for arguments in (["serve", "--max-k", "0"], ["serve", "--config", str(tmp_path / "none")], ["config", "--no-such-flag"]):
        result = draftd(*arguments)
        assert (result.returncode, len(result.stderr.splitlines())) == (2, 1), result.stderr
        assert result.stderr.startswith("draftd: ")


def test_documentation_is_made_from_the_fields() -> None:
    assert (DOCS / "configuration.md").read_text() == markdown()
    for name, info in ServerConfig.model_fields.items():
        assert info.description, name


def test_defaults_suit_the_core() -> None:
    config = ServerConfig()
    assert config.draft_params() == DraftParams()
    assert corpus_config(config) == CorpusConfig()
    assert config.shm_directory() == default_root()


def test_every_setting_is_read_somewhere() -> None:
    """But for those of replication, which are read by their common beginning."""
    trees = [ast.parse(path.read_text()) for path in (DOCS.parent / "server").rglob("*.py")]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    assert set(ServerConfig.model_fields) - read == set()


def test_drafting_defaults_are_those_given() -> None:
    given: dict[str, Any] = {"k": 7, "max_depth": 9, "spec_factor": 1.5, "spec_offset": -2.0, "min_token_prob": 0.3}
    config = ServerConfig(policy="tree", tau=0.2, **{f"draft_{name}": value for name, value in given.items()})
    assert config.draft_params() == DraftParams(policy="tree", tau=0.2, **given)


def test_quotas_of_namespaces_by_pattern() -> None:
    config = corpus_config(ServerConfig(quota_tokens=65_536, namespace_quotas=" team-a/*=8192,team-*=16384 ,"))
    names = ("team-a/x", "team-a", "team-b/y", "other")
    assert [config.quota_of(name) for name in names] == [8192, 16_384, 16_384, 65_536]


def test_addresses() -> None:
    assert parse_address("127.0.0.1:80") == ("127.0.0.1", 80)
    assert parse_address("[::1]:80") == ("::1", 80)
    for wrong in ("", ":80", "host", "host:", "host:-1", "host:65536", "host:http"):
        with pytest.raises(ValueError, match="is not host:port"):
            parse_address(wrong)
