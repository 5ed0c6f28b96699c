package gatewayapi

import "testing"

func TestEchoes(t *testing.T) {
	var e ownWrites
	if e.isOwn("a", "1") {
		t.Error("a first event is no echo")
	}
	end := e.begin("a")
	if !e.isOwn("a", "2") || e.isOwn("b", "2") {
		t.Error("the event of a write under way is left for later, and no other")
	}
	if end("2") {
		t.Error("there was no other event")
	}
	if !e.isOwn("a", "2") || e.isOwn("a", "3") || e.isOwn("a", "") {
		t.Error("the event of the last write is an echo, and no other")
	}
	end = e.begin("a")
	e.isOwn("a", "3") // of somebody else
	e.isOwn("a", "4")
	if !end("4") {
		t.Error("there was another event")
	}
	end = e.begin("a")
	e.isOwn("a", "5")
	if !end("") {
		t.Error("a write that failed has no echo")
	}
	e.forget("a")
	if e.isOwn("a", "4") {
		t.Error("what is gone is forgotten")
	}
}
