"""Files and folders: atomic writing, what may be replaced, and reading of files that strangers wrote."""

from t2r.storage.files import Resumed, finite, json_text, resumable_file, whole_file, write_text, writing
from t2r.storage.folders import check_destination, check_named, refuse_deleting, refuse_replacing, whole_folder
from t2r.storage.locks import take_lock
from t2r.storage.outputs import Output, beginning, refuse_input
from t2r.storage.paths import kind_of, shortened
from t2r.storage.reading import (
    LARGEST_JSON,
    LARGEST_YAML,
    parse_json,
    parse_yaml,
    read_inside,
    read_json,
    read_text,
    understood,
)

__all__ = [
    "LARGEST_JSON",
    "LARGEST_YAML",
    "Output",
    "Resumed",
    "beginning",
    "check_destination",
    "check_named",
    "finite",
    "json_text",
    "kind_of",
    "parse_json",
    "parse_yaml",
    "read_inside",
    "read_json",
    "read_text",
    "refuse_deleting",
    "refuse_input",
    "refuse_replacing",
    "resumable_file",
    "shortened",
    "take_lock",
    "understood",
    "whole_file",
    "whole_folder",
    "write_text",
    "writing",
]
