package tunnel

import (
	"crypto/rand"
	"sync"
	"testing"
)

func TestFingerprint(t *testing.T) {
	hello := make([]byte, 512)
	_, _ = rand.Read(hello)
	of := Fingerprint(hello)
	if again := Fingerprint(append([]byte(nil), hello...)); again != of || of == 0 {
		t.Errorf("the same bytes are %#x and %#x", of, again)
	}
	hello[fingerprintBytes-1]++
	if other := Fingerprint(hello); other == of {
		t.Error("other bytes have the same one")
	}
	if of := Fingerprint(nil); of == 0 {
		t.Error("nothing has none")
	}
}

func TestHellos(t *testing.T) {
	var h hellos
	const most = 16
	const one, other = 1<<31 | hellosPlaces | 7, 1<<30 | hellosPlaces | 7 // in the same place
	for i := range most {
		if !h.enter(one, most) {
			t.Fatalf("the same hello was refused after %d times, want %d", i, most)
		}
	}
	if h.enter(one, most) {
		t.Fatalf("the same hello was let in more than %d times", most)
	}
	h.leave(one)
	if !h.enter(one, most) || h.enter(one, most) {
		t.Fatal("one that is answered does not make room for one more")
	}
	if !h.enter(other, most) {
		t.Fatal("another hello is refused for one in its place")
	}
	for range most { // those whose place another one has got
		h.leave(one)
	}
	for range most - 1 {
		if !h.enter(other, most) {
			t.Fatal("the end of one hello is that of another one")
		}
	}
	if h.enter(other, most) {
		t.Fatalf("the same hello was let in more than %d times", most)
	}
}

func TestHellosAtOnce(t *testing.T) {
	var h hellos
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 1000 {
				if at := uint32(hellosPlaces | i%4<<20 | i%4); h.enter(at, 2) {
					h.leave(at)
				} else {
					t.Error("refused, and at most two are on their way")
				}
			}
		})
	}
	wg.Wait()
	for i := range uint32(4) {
		if n := h.places.Load()[i].Load() & hellosCount; n != 0 {
			t.Errorf("%d are counted at the end", n)
		}
	}
}

func BenchmarkHello(b *testing.B) {
	var h hellos
	hellos := make([][]byte, 1024)
	for i := range hellos {
		hellos[i] = make([]byte, 512)
		_, _ = rand.Read(hellos[i])
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		of := Fingerprint(hellos[i%len(hellos)])
		if h.enter(of, DefaultMaxHelloRepeats) {
			h.leave(of)
		}
		i++
	}
}
