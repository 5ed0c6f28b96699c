package registry

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// says is a source that says what it is given.
type says chan any

func (s says) Run(ctx context.Context, updates chan<- Update) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case what := <-s:
			switch what := what.(type) {
			case error:
				return what
			case Update:
				updates <- what
			}
		}
	}
}

// What a lost source has said stays in force, however long, and everybody is
// told how old it is.
func TestStaleBeatsPartial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log syncBuffer
		r := &Registry{Log: slog.New(slog.NewTextHandler(&log, nil))}
		src := make(says)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx, Static{Name: "flags"}, src) }()
		say := func(what any) {
			src <- what
			time.Sleep(2 * minRebuildInterval)
			synctest.Wait()
		}
		want := func(source string, since time.Duration, text string, generation uint64) {
			t.Helper()
			got, at, err := r.Stale()
			if got != source || err != nil && (time.Since(at) != since || !strings.Contains(err.Error(), text)) || (err == nil) != (text == "") {
				t.Errorf("stale is %q for %v: %v; want %q for %v: %s", got, time.Since(at), err, source, since, text)
			}
			if n := r.Table().Generation(); n != generation {
				t.Errorf("generation %d, want %d", n, generation)
			}
		}
		west := Update{Source: "west", Snapshot: Snapshot{Services: []*Service{service(t, "a.test")}}}
		say(west)
		want("", 0, "", 1)

		say(Update{Source: "west", Err: errors.New("it went dark")})
		want("west", 200*time.Millisecond, "it went dark", 1)
		say(Update{Source: "west", Err: errors.New("it is dark still")})
		want("west", 400*time.Millisecond, "it is dark still", 1)
		if strings.Contains(log.String(), "source is still failing") {
			t.Errorf("the log has a reminder before 10 minutes:\n%s", log.String())
		}
		time.Sleep(time.Hour)
		want("west", time.Hour+400*time.Millisecond, "it is dark still", 1)
		if _, err := r.Resolve(t.Context(), byName("a.test", 443, 443)); err != nil {
			t.Errorf("the table is an hour old: %v", err)
		}
		if n := strings.Count(log.String(), `msg="source is still failing; keeping its last snapshot" source=west`); n != 6 {
			t.Errorf("%d reminders in an hour, want 6:\n%s", n, log.String())
		}

		// The same again is no new table, and what differs is one.
		say(west)
		want("", 0, "", 1)
		if n := strings.Count(log.String(), `msg="source recovered" source=west after=1h0m`); n != 1 {
			t.Errorf("it was said %d times that it is back, want once:\n%s", n, log.String())
		}
		say(Update{Source: "west", Snapshot: Snapshot{Services: []*Service{service(t, "a.test")}}})
		want("", 0, "", 2)

		// A run that fails is a loss, too, till the source has spoken again. The
		// longest loss counts.
		say(Update{Source: "east", Err: errors.New("no east")})
		say(errors.New("crashed"))
		want("east", 400*time.Millisecond, "no east", 2)
		say(Update{Source: "east"})
		want("", 0, "", 3) // and it now says that it has nothing
		say(errors.New("crashed"))
		want("registry.says", 200*time.Millisecond, "crashed", 3)
		time.Sleep(minRestart)
		want("registry.says", minRestart+200*time.Millisecond, "crashed", 3)
		say(west)
		want("", 0, "", 4)
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// A source that has seen nothing yet makes no table, and one that has nothing
// more to say is not lost.
func TestLostFromTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &Registry{}
		src := make(says)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx, src) }()
		src <- Update{Source: "west", Err: errors.New("dark")}
		time.Sleep(time.Minute)
		synctest.Wait()
		if r.Table() != nil {
			t.Error("there is a table of nothing")
		}
		if got, _, _ := r.Stale(); got != "west" {
			t.Errorf("stale is %q, want west", got)
		}
		cancel()
		<-done
	})
}

// What is in force may be older than the process.
func TestLostSinceBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &Registry{}
		src := make(says)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx, src) }()
		begin := time.Now()
		for _, c := range []struct {
			since, want time.Duration // from begin
		}{
			{time.Hour, 0}, // a clock that went back
			{-time.Hour, -time.Hour},
			{-time.Minute, -time.Hour},
		} {
			src <- Update{Source: "west", Err: errors.New("dark"), Since: begin.Add(c.since)}
			synctest.Wait()
			if _, since, _ := r.Stale(); since.Sub(begin) != c.want {
				t.Errorf("since %v: lost since %v, want %v", c.since, since.Sub(begin), c.want)
			}
			time.Sleep(time.Second)
		}
		cancel()
		<-done
	})
}
