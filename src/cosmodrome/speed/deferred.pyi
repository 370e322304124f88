from cosmodrome.speed.deferred_pure import Deferred as Deferred
