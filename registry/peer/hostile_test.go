package peer

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"runtime/metrics"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// liveHeap returns the bytes that the last garbage collection has found in use.
func liveHeap() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

// A generator writes lines of a catalog, the n-th at each call.
type generator func(b *bytes.Buffer, n int)

// head writes the beginning of a line.
func head(b *bytes.Buffer, kind string, generation int, more bool) {
	fmt.Fprintf(b, `{"version":1,"kind":%q,"generation":%d,"more":%t`, kind, generation, more)
}

// list writes services from and up to others.
func list(b *bytes.Buffer, from, to int, names func(i int) string) {
	b.WriteString(`,"services":[`)
	for i := from; i < to; i++ {
		if i > from {
			b.WriteByte(',')
		}
		fmt.Fprintf(b, `{"key":"k%d","names":[%s]}`, i, names(i))
	}
	b.WriteByte(']')
}

// A peer that sends ten million services, in whatever way, is refused at the limit: little is
// held for it, it is told why, and the table has all that it had.
func TestEndlessCatalogs(t *testing.T) {
	const (
		all     = 10_000_000 // services
		perLine = 500
	)
	one := func(i int) string { return fmt.Sprintf(`"s%d.west.example"`, i) }
	var long strings.Builder // what one service may have, nearly a line
	for i := range 230 {
		fmt.Fprintf(&long, `,"n%d.%s.%[2]s.%[2]s.%[2]s.west.example"`, i, strings.Repeat("x", 58))
	}
	large := func(i int) string { return fmt.Sprintf(`"s%d.west.example"%s`, i, long.String()) }
	short := func(i int) string {
		var b strings.Builder
		for n := range 200 {
			fmt.Fprintf(&b, `,"%x.%x.west.example"`, n, i)
		}
		return b.String()[1:]
	}
	for _, c := range []struct {
		name  string
		lines int
		next  generator
		want  string
	}{
		{"services", all / perLine, func(b *bytes.Buffer, n int) {
			head(b, KindSnapshot, 6, true)
			list(b, n*perLine, (n+1)*perLine, one)
		}, "the peer offers more than 10000 services"},
		{"services outside of its zones", all / perLine, func(b *bytes.Buffer, n int) {
			head(b, KindSnapshot, 6, true)
			list(b, n*perLine, (n+1)*perLine, func(i int) string { return fmt.Sprintf(`"s%d.bank.example"`, i) })
		}, "the peer offers more than 10000 services"},
		{"changes", all / perLine, func(b *bytes.Buffer, n int) {
			head(b, KindChange, 6+n, false)
			list(b, n*perLine, (n+1)*perLine, one)
		}, "the peer offers more than 10000 services"},
		{"the same service", all, func(b *bytes.Buffer, n int) {
			head(b, KindChange, 6, true)
			list(b, 0, 1, large)
		}, "a change has more than 33554432 bytes"},
		{"no services", all, func(b *bytes.Buffer, n int) {
			head(b, KindSnapshot, 6, true)
		}, "a snapshot has more than 10000 lines"},
		{"removals", all, func(b *bytes.Buffer, n int) {
			head(b, KindChange, 6, true)
			fmt.Fprintf(b, `,"removed":["a"%s]`, strings.Repeat(`,"`+strings.Repeat("k", 600)+`"`, 100))
		}, "a change has more than 33554432 bytes"},
		{"large services", all, func(b *bytes.Buffer, n int) {
			head(b, KindSnapshot, 6, true)
			list(b, n, n+1, large)
		}, "what the peer offers takes more than 16777216 bytes"},
		{"short names", all, func(b *bytes.Buffer, n int) {
			head(b, KindSnapshot, 6, true)
			list(b, 10*n, 10*n+10, short)
		}, "what the peer offers has more than 100000 names"},
		{"large services beside small ones that it takes back", all, func(b *bytes.Buffer, n int) {
			head(b, KindChange, 6+n, false)
			b.WriteString(`,"removed":["c0"`)
			for i := 1; i < 100; i++ {
				fmt.Fprintf(b, `,"c%d"`, i)
			}
			fmt.Fprintf(b, `],"services":[{"key":"k%d","names":[%s]}`, n, large(n))
			for i := range 100 {
				fmt.Fprintf(b, `,{"key":"c%d"}`, i)
			}
			b.WriteByte(']')
		}, "what the peer offers takes more than 16777216 bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			east, f := fakeWest(t)
			go f.send(hello)
			f.next(KindSubscribe)
			f.send(first)
			east.awaitNames(t, "peer/west", "a.west.example")

			before := liveHeap()
			wrote := make(chan int, 1)
			go func() {
				var line bytes.Buffer
				sent := 0
				for n := range c.lines {
					line.Reset()
					c.next(&line, n)
					line.WriteString("}\n")
					_ = f.c.SetWriteDeadline(time.Now().Add(time.Minute))
					if _, err := f.c.Write(line.Bytes()); err != nil {
						break
					}
					sent += line.Len()
				}
				wrote <- sent
			}()
			var peak uint64
			told := make(chan *Message, 1)
			go func() { told <- f.ended() }()
			var why *Message
			for why == nil {
				select {
				case why = <-told:
				case <-time.After(time.Millisecond):
				}
				peak = max(peak, liveHeap())
			}
			if !strings.Contains(why.Error, c.want) {
				t.Errorf("the peer is told %q, want %q", why.Error, c.want)
			}
			if sent := <-wrote; sent > 3*MaxCatalog {
				t.Errorf("%d bytes are read of it, limit %d", sent, 2*MaxCatalog)
			}
			if peak > before+64<<20 {
				t.Errorf("the heap grows from %d to %d MiB", before>>20, peak>>20)
			}
			east.await(t, "the end of the stream", func() bool { return east.stale["peer/west"] != nil })
			if got := east.lockedNames(); !slices.Contains(got, "a.west.example") || len(got) > MaxCatalog/200 {
				t.Errorf("there are %d names of the peer, want those of the last good catalog", len(got))
			}
		})
	}
}

// ended returns the error that the peer is told at the end of the stream.
func (f *fake) ended() *Message {
	for {
		_ = f.c.SetReadDeadline(time.Now().Add(2 * time.Minute))
		line, err := f.r.ReadBytes('\n')
		m := &Message{}
		if err != nil {
			m.Error = "nothing: " + err.Error()
			return m
		}
		if err := json.Unmarshal(line, m); err != nil || m.Kind == KindError {
			return m
		}
	}
}

// A catalog that is refused takes nothing from the table: neither what the peer has offered
// before, nor what others have.
func TestRefusedCatalogLeavesTheTable(t *testing.T) {
	east := newSite(t, "east")
	accepted := make(chan net.Conn, 1)
	east.peers.NewTransport = func(*registry.Service, *registry.Endpoint, *registry.Gateway) (tunnel.Transport, error) {
		return &fakeLink{accepted: accepted}, nil
	}
	south := configOf("south", false)
	if err := east.peers.Configure([]Config{configOf("west", true), south}); err != nil {
		t.Fatal(err)
	}
	reg := &registry.Registry{}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- reg.Run(ctx, fixed{snapshotOf(service("own.east.example"))}, east.peers)
	}()
	f := &fake{t: t, c: <-accepted}
	f.r = bufio.NewReader(f.c)
	t.Cleanup(func() {
		cancel()
		_ = f.c.Close()
		<-ended
	})
	has := func(name string) bool {
		n, err := tunnel.ParseName(name)
		if err != nil {
			t.Fatal(err)
		}
		table := reg.Table()
		if table == nil {
			return false
		}
		_, err = table.Find(&tunnel.Request{Name: n, Port: 443})
		return err == nil
	}
	await := func(what string, right func() bool) {
		t.Helper()
		testnet.Eventually(t, time.Minute, right, "%s: not within a minute", what)
	}
	go f.send(hello)
	f.next(KindSubscribe)
	f.send(first)
	await("the first catalog", func() bool { return has("a.west.example") && has("own.east.example") })
	told := make(chan *Message, 1)
	go func() { told <- f.ended() }()
	var line bytes.Buffer
	for n := range 100 {
		line.Reset()
		head(&line, KindSnapshot, 6, true)
		list(&line, n*500, (n+1)*500, func(i int) string { return fmt.Sprintf(`"s%d.west.example"`, i) })
		f.send(line.String() + "}")
	}
	if why := <-told; !strings.Contains(why.Error, "more than 10000 services") {
		t.Errorf("the peer is told %q", why.Error)
	}
	await("the refusal", func() bool {
		return slices.ContainsFunc(east.peers.Status(), func(s Status) bool { return strings.Contains(s.Problem, "more than 10000 services") })
	})
	await("the loss", func() bool { source, _, _ := reg.Stale(); return source == "peer/west" })
	for name, want := range map[string]bool{"a.west.example": true, "own.east.example": true, "s1.west.example": false} {
		if has(name) != want {
			t.Errorf("the table has %q: %t, want %t", name, !want, want)
		}
	}
}

// fixed is a source that has one snapshot.
type fixed struct{ registry.Snapshot }

func (s fixed) Run(ctx context.Context, updates chan<- registry.Update) error {
	select {
	case updates <- registry.Update{Source: "fixed", Snapshot: s.Snapshot}:
	case <-ctx.Done():
	}
	<-ctx.Done()
	return ctx.Err()
}
