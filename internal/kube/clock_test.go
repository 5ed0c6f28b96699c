package kube

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

type lines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Whoever asks the API server something, a clock that is not ours is told of once.
func TestAClockThatIsNotOurs(t *testing.T) {
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Date", time.Now().Add(time.Hour).UTC().Format(http.TimeFormat))
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte("{}"))
	}))
	defer api.Close()
	var log lines
	k, err := New(Config{Kubeconfig: kubeconfig(t, api.URL), Cluster: "west", Discovery: &Discovery{}, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := k.core.Discovery().ServerVersion(); err != nil {
			t.Fatal(err)
		}
	}
	if n := strings.Count(log.String(), "clock of the API server differs"); n != 1 {
		t.Errorf("got %d lines, want one:\n%s", n, log.String())
	}
}
