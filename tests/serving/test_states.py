"""States over HTTP: an answer costs its new tokens, a state is a fork, and a file comes back as it went."""

import asyncio
import json
import os
import shutil
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from engines import alone
from serving_models import STOP, model, running, served, teacher, tokenizer
from t2r import T2RError
from t2r.serving.errors import ApiError
from t2r.serving.prefixes import Prefixes
from t2r.serving.served import ServedModel
from t2r.serving.state_files import digest, packed


def text_of(response):
    (item,) = response["output"]
    return item["content"][0]["text"]


def wanted(text, tokens, stop=None, made=None):
    """Return what the model answers to a whole text."""
    ids = torch.tensor([tokenizer()(text).input_ids])
    found = alone(made or model(stop=stop), ids, max_new_tokens=tokens)
    return tokenizer().decode([token for token in found if token != stop])


async def say(client, line, tokens=6, **more):
    answer = await client.post("/v1/responses", json={"input": line, "max_output_tokens": tokens, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_answers_go_on_from_states():
    """A turn reads what is new. The same id again is a fork, and an earlier one an edit."""

    async def main():
        async with running(served(stop=STOP)) as (client, _):
            first = await say(client, "Hello", instructions="xyz")
            text = "s~xyz|u~Hello|a~"
            assert text_of(first) == wanted(text, 6, STOP)
            text += text_of(first)
            read = first["usage"]["total_tokens"] - 1
            answers = await asyncio.gather(
                *(say(client, line, previous_response_id=first["id"]) for line in ("one", "two", "one"))
            )
            for line, answer in zip(("one", "two", "one"), answers, strict=True):
                assert text_of(answer) == wanted(f"{text}|u~{line}|a~", 6, STOP)
                assert answer["usage"]["input_tokens_details"]["cached_tokens"] == read
                assert answer["usage"]["input_tokens"] == read + 1 + len(f"|u~{line}|a~")
            last = await say(client, "three", previous_response_id=answers[1]["id"], store=False)
            assert text_of(last) == wanted(f"{text}|u~two|a~{text_of(answers[1])}|u~three|a~", 6, STOP)
            # The whole answer comes again; what was not stored does not.
            assert (await client.get(f"/v1/responses/{first['id']}")).json() == first
            assert (await client.get(f"/v1/responses/{last['id']}")).status_code == 404
            assert (await client.delete(f"/v1/responses/{first['id']}")).json()["deleted"]
            gone = await client.post("/v1/responses", json={"input": "a", "previous_response_id": first["id"]})
            assert gone.status_code == 404
            assert gone.json()["error"]["param"] == "previous_response_id"
            assert first["id"] in gone.json()["error"]["message"]

    asyncio.run(main())


def test_a_document_is_read_once():
    async def main():
        async with running(served()) as (client, _):
            document = "abcdefgh" * 20
            made = (await client.post("/v1/states", json={"text": document})).json()
            assert made["tokens"] == made["usage"]["input_tokens"] == len(f"u~{document}!!")
            assert made["kind"] == "document"
            for line in ("one", "two"):
                answer = await say(client, line, previous_response_id=made["id"])
                # The tokenizer of the tests has no line breaks: each is an unknown token.
                assert text_of(answer) == wanted(f"u~{document}!!{line}|a~", 6)
                assert answer["usage"]["input_tokens_details"]["cached_tokens"] == made["tokens"]
            more = (await client.post("/v1/states", json={"text": "xyz", "previous_response_id": made["id"]})).json()
            answer = await say(client, "one", previous_response_id=more["id"])
            assert text_of(answer) == wanted(f"u~{document}!!xyz!!one|a~", 6)
            # a plain text, after which a text goes on
            plain = (await client.post("/v1/states", json={"text": document, "chat": False})).json()
            body = {"prompt": "xy", "state": plain["id"], "max_tokens": 5}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["choices"][0]["text"] == wanted(f"{document}xy", 5)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(document)
            # and the same without saying it: the text begins with what was read
            body = {"prompt": f"{document}z", "max_tokens": 5}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["choices"][0]["text"] == wanted(f"{document}z", 5)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(document)

    asyncio.run(main())


def test_states_of_two_models():
    """Student and teacher have their own. One's state is no state of the other."""

    async def main():
        other = ServedModel("teacher", teacher(), tokenizer())
        async with running(served(), other) as (client, _):
            models = (await client.get("/v1/models")).json()["data"]
            assert [each["t2r"]["kind"] for each in models] == ["rnn", "transformer"]
            assert [each["t2r"]["bytes_per_token"] > 0 for each in models] == [False, True]
            for name, made in (("rnn", None), ("teacher", teacher())):
                first = await say(client, "Hello", model=name)
                second = await say(client, "one", model=name, previous_response_id=first["id"])
                text = f"u~Hello|a~{wanted('u~Hello|a~', 6, made=made)}"
                assert text_of(first) == text[10:]
                assert text_of(second) == wanted(f"{text}|u~one|a~", 6, made=made)
                assert second["usage"]["input_tokens_details"]["cached_tokens"] == len(text) - 1
            body = {"input": "a", "model": "rnn", "previous_response_id": first["id"]}
            answer = await client.post("/v1/responses", json=body)
            assert answer.status_code == 400
            assert "is a state of the model teacher, not of rnn" in answer.json()["error"]["message"]

    asyncio.run(main())


def test_download_and_upload(tmp_path):
    """A file goes on where it ended, here and with `load_state`. What is not a state is refused in one line."""

    async def main():
        async with running(served(), states=str(tmp_path)) as (client, service):
            first = await say(client, "Hello")
            file = (await client.get(f"/v1/states/{first['id']}/content")).content
            (tmp_path / "own.safetensors").write_bytes(file)
            state = model().load_state(tmp_path / "own.safetensors")
            assert state.get_seq_length() == first["usage"]["total_tokens"]
            assert [m["role"] for m in state.chat["messages"]] == ["user", "assistant"]
            again = (await client.post("/v1/states/content", content=file)).json()
            assert again["kind"] == "upload"
            second = await say(client, "one", previous_response_id=again["id"])
            assert text_of(second) == wanted(f"u~Hello|a~{text_of(first)}|u~one|a~", 6)
            # a state that t2r has saved without a server
            cache = model().make_cache()
            with torch.no_grad():
                model()(torch.tensor([tokenizer()("abcdefg").input_ids]), past_key_values=cache)
            cache.save(tmp_path / "plain.safetensors")
            plain = (tmp_path / "plain.safetensors").read_bytes()
            made = (await client.post("/v1/states/content", content=plain)).json()
            body = {"prompt": "xy", "state": made["id"], "max_tokens": 5}
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["choices"][0]["text"] == wanted("abcdefgxy", 5)
            # foreign and damaged ones
            foreign = model("gpt2").make_cache()
            with torch.no_grad():
                model("gpt2")(torch.tensor([[5, 6]]), past_key_values=foreign)
            foreign.save(tmp_path / "foreign.safetensors")
            flipped = bytearray(file)
            flipped[-9] ^= 1
            bad = {
                "": b"",
                "not a saved state": b"nothing" * 50,
                "is the state of another model": (tmp_path / "foreign.safetensors").read_bytes(),
                "truncated": file[:-20],
                "its data has changed": bytes(flipped),
                "a saved state": struct.pack("<Q", 1 << 60) + file[8:],
            }
            before = len(service.states)
            for words, content in bad.items():
                answer = await client.post("/v1/states/content", content=content)
                assert answer.status_code == 400
                message = answer.json()["error"]["message"]
                assert words in message
                assert "\n" not in message
                assert "/" not in message
            assert len(service.states) == before

    asyncio.run(main())


def test_what_was_uploaded_is_found_by_its_id_only(tmp_path):
    """Its tokens are what the client says: another client, whose text begins so, would go on from something else."""
    forged = tmp_path / "forged.safetensors"

    async def main():
        async with running(served(), states=str(tmp_path / "states")) as (client, _):
            one = (await client.post("/v1/states", json={"text": "xyz", "chat": False})).json()
            forged.write_bytes((await client.get(f"/v1/states/{one['id']}/content")).content)
        with safe_open(forged, "pt") as file:
            tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        said = json.loads(about["t2r_serving"])
        said["tokens"] = packed([*tokenizer()("abc").input_ids, *said["unread"]][:3])
        said["unread"], said["digest"] = [], digest(tensors, said["tokens"])
        forged.unlink()
        save_file(tensors, forged, metadata=about | {"t2r_serving": json.dumps(said)})
        async with running(served(), states=str(tmp_path / "states")) as (client, service):
            answer = await client.post("/v1/states/content", content=forged.read_bytes())
            assert answer.status_code == 200, answer.text
            body = {"prompt": "d", "state": answer.json()["id"], "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200  # what follows it is not either
            await settled(service)
        async with running(served(), states=str(tmp_path / "states")) as (client, service):
            assert len(service.states) == 3
            answer = (await client.post("/v1/completions", json={"prompt": "abcdef", "max_tokens": 6})).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert answer["choices"][0]["text"] == wanted("abcdef", 6)

    asyncio.run(main())


def flipped(file, other):
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


DAMAGES = {
    "a bit": flipped,
    "the file of another state": lambda file, other: shutil.copy(other, file),
    "its end is missing": lambda file, other: file.write_bytes(file.read_bytes()[:-9]),
    "it is gone": lambda file, other: file.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_change_while_the_server_runs(tmp_path, damage):
    """Also those that this process has written. The client is told, and not where the file was."""

    async def main():
        async with running(served(), states=str(tmp_path), state_memory=0) as (client, service):
            one, other = await say(client, "Hello"), await say(client, "there")
            await settled(service)
            files = [service.states.by_id[each["id"]].file for each in (one, other)]
            DAMAGES[damage](*files)
            body = {"input": "a", "previous_response_id": one["id"]}
            answer = await client.post("/v1/responses", json=body)
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "damaged"
            assert "/" not in answer.json()["error"]["message"]
            await say(client, "a", previous_response_id=other["id"])

    asyncio.run(main())


def test_a_state_in_memory_does_not_depend_on_its_file(tmp_path):
    """A file that was mapped, and becomes shorter, would end the process."""

    async def main():
        async with running(served(), states=str(tmp_path)) as (client, _):
            first = await say(client, "Hello")
        async with running(served(), states=str(tmp_path)) as (client, service):
            second = await say(client, "one", previous_response_id=first["id"])  # which reads the file
            service.states.by_id[first["id"]].file.write_bytes(b"")
            again = await say(client, "one", previous_response_id=first["id"])
            assert text_of(again) == text_of(second)

    asyncio.run(main())


def renamed(place, header):
    """Make a file of another id, with this header."""
    file = next(place.glob("resp_*"))
    with safe_open(file, "pt") as opened:
        tensors, about = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    said = json.loads(about["t2r_serving"]) | {"id": "resp_odd"} | header
    save_file(tensors, place / "resp_odd.safetensors", metadata=about | {"t2r_serving": json.dumps(said)})


ODD = {
    "a link to nothing": lambda place: (place / "resp_odd.safetensors").symlink_to(place / "nothing"),
    "a folder": lambda place: (place / "resp_odd.safetensors").mkdir(),
    "a folder in place of a temporary file": lambda place: (place / ".odd.tmp").mkdir(),
    "a pipe": lambda place: os.mkfifo(place / "resp_odd.safetensors"),
    "too many unread tokens": lambda place: renamed(place, {"unread": [5, 5]}),
    "a token that the model does not have": lambda place: renamed(place, {"unread": [97]}),
    "a response that is not JSON": lambda place: renamed(place, {"told": {"x": float("nan")}}),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_else_is_in_the_folder_is_left_out(tmp_path, odd):
    async def main():
        async with running(served(), states=str(tmp_path)) as (client, _):
            first = await say(client, "Hello")
        (place,) = (path for path in tmp_path.iterdir() if path.is_dir())
        ODD[odd](place)
        async with running(served(), states=str(tmp_path)) as (client, service):
            assert list(service.states.by_id) == [first["id"]]
            await say(client, "one", previous_response_id=first["id"])

    asyncio.run(main())


def test_the_route_of_responses_deletes_only_responses():
    async def main():
        async with running(served()) as (client, _):
            made = (await client.post("/v1/states", json={"text": "abc"})).json()
            assert (await client.delete(f"/v1/responses/{made['id']}")).status_code == 404
            assert (await client.get(f"/v1/states/{made['id']}")).status_code == 200

    asyncio.run(main())


def test_the_list_of_states():
    async def main():
        async with running(served()) as (client, service):
            ids = [(await say(client, line))["id"] for line in ("one", "two", "three")]
            listed = (await client.get("/v1/states")).json()
            assert [each["id"] for each in listed["data"]] == ids[::-1]
            sizes = {each["bytes"] for each in listed["data"]}
            assert sizes == {model().make_static_cache(1).nbytes}
            assert listed["memory_bytes"] == 3 * max(sizes)
            long = await say(client, "four", 300)  # a user costs the same after any number of tokens
            assert (await client.get(f"/v1/states/{long['id']}")).json()["bytes"] == sizes.pop()
            await client.delete(f"/v1/states/{long['id']}")
            assert (await client.get(f"/v1/states/{ids[0]}")).json()["tokens"] == len("u~one|a~") + 6
            for id in ids:
                assert (await client.delete(f"/v1/states/{id}")).json() == {
                    "id": id,
                    "object": "state",
                    "deleted": True,
                }
            assert (await client.get("/v1/states")).json() == {
                "object": "list",
                "data": [],
                "memory_bytes": 0,
                "disk_bytes": 0,
            }
            assert not service.states.prefixes.known

    asyncio.run(main())


async def settled(service):
    """Wait until everything is written."""
    while any(stored.writing for stored in service.states.by_id.values()):
        await asyncio.sleep(0.01)


def test_budgets_and_restarts(tmp_path):
    """The least recently used states leave the memory, and come back from disk, also in another process."""

    async def first():
        async with running(served(), states=str(tmp_path), state_memory=0) as (client, service):
            ids = [(await say(client, line))["id"] for line in ("one", "two", "three")]
            await settled(service)
            assert service.states.in_memory == 0
            assert [s["place"] for s in (await client.get("/v1/states")).json()["data"]] == ["disk"] * 3
            again = await say(client, "four", previous_response_id=ids[0])
            await settled(service)
            assert text_of(again) == wanted(f"u~one|a~{wanted('u~one|a~', 6)}|u~four|a~", 6)
            return ids, again

    async def second(ids, again):
        async with running(served(), states=str(tmp_path)) as (client, service):
            assert len(service.states) == 4
            body = {"input": "four", "max_output_tokens": 6, "previous_response_id": ids[0]}
            answer = (await client.post("/v1/responses", json=body)).json()
            assert text_of(answer) == text_of(again)
            assert answer["usage"] == again["usage"]
            assert (await client.get(f"/v1/responses/{again['id']}")).json() == again
            # a chat that sends everything
            messages = [("user", "one"), ("assistant", wanted("u~one|a~", 6)), ("user", "four")]
            body = {"messages": [{"role": r, "content": c} for r, c in messages], "max_tokens": 6}
            chat = (await client.post("/v1/chat/completions", json=body)).json()
            assert chat["choices"][0]["message"]["content"] == text_of(again)
            assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] == len("u~one|a~") + 5
            # damaged files: one that is found out when it is read, one at the start
            files = sorted(tmp_path.glob("*/*.safetensors"))
            for stored in service.states.by_id.values():
                stored.cache = None
            service.states.in_memory = 0
            bad = next(path for path in files if path.stem == ids[1])
            data = bytearray(bad.read_bytes())
            data[-9] ^= 1
            bad.write_bytes(data)
            answer = await client.post("/v1/responses", json={"input": "a", "previous_response_id": ids[1]})
            assert answer.status_code == 404
            assert "damaged" in answer.json()["error"]["message"]
            assert (await say(client, "a", previous_response_id=ids[2]))["status"] == "incomplete"
            broken = next(path for path in files if path.stem == ids[2])
            return broken

    async def third(broken):
        broken.write_bytes(broken.read_bytes()[:100])
        (broken.parent / "more.safetensors").write_bytes(b"x" * 1000)
        (broken.parent / ".x.safetensors.1-2.tmp").write_bytes(b"x" * 1000)
        async with running(served(), states=str(tmp_path)) as (client, service):
            assert service.states.failures == 2
            assert not list(broken.parent.glob(".*.tmp"))
            assert (await say(client, "Hello"))["status"] == "incomplete"

    ids, again = asyncio.run(first())
    asyncio.run(third(asyncio.run(second(ids, again))))


def test_without_a_folder_states_are_forgotten():
    async def main():
        async with running(served(), state_memory=0) as (client, service):
            first = await say(client, "one")
            assert len(service.states) == 0
            assert service.states.dropped == 1
            answer = await client.post("/v1/responses", json={"input": "a", "previous_response_id": first["id"]})
            assert answer.status_code == 404

    asyncio.run(main())


def test_old_states_are_deleted_and_the_disk_has_a_limit(tmp_path):
    async def main():
        async with running(served(), states=str(tmp_path)) as (client, service):
            ids = [(await say(client, line))["id"] for line in ("one", "two", "three")]
            await settled(service)
            service.states.by_id[ids[0]].used -= 3600 * 169
            listed = (await client.get("/v1/states")).json()["data"]
            assert [each["id"] for each in listed] == [ids[2], ids[1]]
            service.states.disk = service.states.on_disk - 1
            last = await say(client, "four")
            await settled(service)
            listed = (await client.get("/v1/states")).json()["data"]
            assert [each["id"] for each in listed] == [last["id"]]
        assert [path.stem for path in tmp_path.glob("*/*.safetensors")] == [last["id"]]

    asyncio.run(main())


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")

    async def main():
        async with running(served(), states=str(tmp_path / "file" / "states")):
            pass

    with pytest.raises(T2RError, match=r"states cannot be kept in .*: Not a directory"):
        asyncio.run(main())


def test_two_servers_do_not_share_a_folder(tmp_path):
    async def main():
        async with running(served(), states=str(tmp_path)):
            with pytest.raises(T2RError, match="another server keeps its states in"):
                async with running(served(), states=str(tmp_path)):
                    pass
        async with running(served(), states=str(tmp_path)):
            pass

    asyncio.run(main())


def test_the_longest_known_prefix():
    known = Prefixes()
    for id, tokens in (("a", [1, 2]), ("b", [1, 2, 3]), ("c", [2]), ("d", [1, 2, 3]), ("e", [])):
        known.add("m", tokens, id)
    assert known.longest("m", [1, 2, 3, 4]) == "d"
    assert known.longest("m", [1, 2, 3]) == "a"
    assert known.longest("m", [2, 9]) == "c"
    assert known.longest("m", [3, 1]) is None
    assert known.longest("other", [1, 2, 3, 4]) is None
    known.remove("m", [1, 2, 3], "d")
    assert known.longest("m", [1, 2, 3, 4]) == "b"


def test_a_state_that_is_deleted_while_a_request_is_read():
    async def main():
        async with running(served()) as (client, service):
            first = await say(client, "Hello")
            found = service.states.get(first["id"])
            service.states.forget(found)
            with pytest.raises(ApiError, match="there is no state"):
                await service.states.load(found)

    asyncio.run(main())
