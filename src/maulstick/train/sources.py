"""Where the loop gets latents, text states and further conditioning from, with what is to be cached before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accelerate import Accelerator

from maulstick.data.cache import TextStateCache
from maulstick.data.captions import possible_captions
from maulstick.data.index import Progress
from maulstick.data.latents import CachedLatents, FreshLatents, LatentSource, Making, Report
from maulstick.options.schema import DatasetOptions, TrainOptions
from maulstick.train.conditioner import Conditioner
from maulstick.train.console import RunConsole
from maulstick.train.prepare import Prepared
from maulstick.train.validation import judged_captions

Result = TypeVar("Result")


def how_to_make(dataset: DatasetOptions) -> Making:
    """Return what the options say about the making of latents."""
    return Making(at_once=dataset.vae_batch_size, threads=dataset.max_data_loader_n_workers)


class Sources:
    """Makes the sources of a run ready, with a bar on the console; encoders that are done are let go."""

    def __init__(self, options: TrainOptions, accelerator: Accelerator, console: RunConsole, report: Report) -> None:
        self.options, self.accelerator, self.console, self.report = options, accelerator, console, report

    def latents(self, prepared: Prepared) -> LatentSource:
        """Return the latents of all images, cached where the options ask for it."""
        dataset = self.options.dataset
        device = self.accelerator.device
        if not dataset.cache_latents:
            return FreshLatents(
                prepared.index, prepared.family, device=device, report=self.report, making=how_to_make(dataset)
            )
        latents = CachedLatents(
            prepared.index,
            prepared.family,
            to_disk=dataset.cache_latents_to_disk,
            device=device,
            report=self.report,
            making=how_to_make(dataset),
        )
        self._with_progress("caching latents", latents.prepare, in_turn=dataset.cache_latents_to_disk)
        prepared.family.release_encoders(vae=True, text_encoders=False)
        return latents

    def new_conditioner(self, prepared: Prepared) -> Conditioner:
        """Return the conditioner without anything done for it; nothing is written."""
        return prepared.trains.conditioner(self.options, prepared.index, prepared.seed, self.report)

    def conditioner(self, prepared: Prepared) -> Conditioner:
        """Return the conditioner, ready to train."""
        conditioner = self.new_conditioner(prepared)
        if conditioner.title is not None:
            self._with_progress(conditioner.title, conditioner.prepare, in_turn=True)
        return conditioner

    def text_states(self, prepared: Prepared, conditioner: Conditioner) -> TextStateCache:
        """Return the text states: every caption is encoded once, before training or when it first comes up."""
        # On the CPU: a cache on the GPU would take the room that training needs.
        states = TextStateCache(prepared.family, device="cpu")
        if not self.options.dataset.cache_text_encoder_outputs:
            return states
        captions = possible_captions(prepared.index.records)
        if captions is None:
            self.console.say("note       shuffled captions are too many to list: the text encoder stays loaded")
            return states
        captions |= conditioner.further_captions
        if prepared.index.held_back:
            captions |= judged_captions(prepared.index, self.options, prepared.seed)
        self._with_progress("caching text states", lambda progress: states.encode_all(sorted(captions), progress))
        prepared.family.release_encoders(vae=False, text_encoders=True)
        return states

    def _with_progress(self, title: str, work: Callable[[Progress], Result], *, in_turn: bool = False) -> Result:
        """``in_turn``: the first process writes files, the others wait and read them."""
        shown = -1

        def progress(done: int, total: int) -> None:
            nonlocal shown
            if shown < 0:
                self.console.begin(title, total)
                shown = 0
            self.console.advance(done - shown)
            shown = done

        try:
            if not in_turn:
                return work(progress)
            with self.accelerator.main_process_first():
                return work(progress)
        finally:
            self.console.end()
