# SPDX-License-Identifier: Apache-2.0
"""Nothing of a data set is unpacked. `datasets` knows an archive by its content, whatever its name,
and unpacks it into its cache, where chained links lead out; what is compressed has no bound.

Owns what becomes of the files that its builders ask for, of the Hub or of a folder: they are read
as they are, and those that others would unpack are refused."""

from __future__ import annotations

from tarfile import HeaderError, TarInfo
from typing import Any

from penstock.dataflow.sources.tables import import_data_package
from penstock.errors import ConfigError

_TAR_HEADER_BYTES = 512


def downloads_of(builder: Any, path_key: str) -> Any:
    """What `download_and_prepare` gets its files from."""
    datasets = import_data_package("datasets", path_key)
    nested = import_data_package("datasets.utils.py_utils", path_key).NestedDataStructure

    class Downloads(datasets.DownloadManager):
        def extract(self, path_or_paths: Any) -> Any:
            for path in nested(path_or_paths).flatten():
                if _is_packed(str(path)):
                    raise _refused(path, path_key)
            return path_or_paths

        def iter_archive(self, path_or_buf: Any) -> Any:
            raise _refused(path_or_buf, path_key)

    config = datasets.DownloadConfig(use_etag=False)
    return Downloads(download_config=config, base_path=builder.base_path)


def _refused(path: Any, path_key: str) -> ConfigError:
    return ConfigError(
        f"{path} is an archive or compressed, and is not unpacked here; unpack it into a new "
        f"folder, and set {path_key} to that folder"
    )


def _is_packed(path: str) -> bool:
    """By its name, too: pandas goes by it. A tar has no magic number, but a checksum. No header of
    it is read further: its length is what the author says."""
    files = import_data_package("datasets.utils.file_utils", path)
    extractors = import_data_package("datasets.utils.extract", path).Extractor.extractors.values()
    if files._get_path_extension(path) in files.COMPRESSION_EXTENSION_TO_PROTOCOL:
        return True
    with open(path, "rb") as file:
        start = file.read(_TAR_HEADER_BYTES)
    if any(start.startswith(tuple(getattr(e, "magic_numbers", ()))) for e in extractors):
        return True
    try:
        TarInfo.frombuf(start, "utf-8", "surrogateescape")
    except HeaderError:
        return False
    return True
