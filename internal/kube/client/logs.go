package client

import (
	"context"
	"log/slog"
	"strings"
	"sync"

	"k8s.io/klog/v2"
)

// Logs sends client-go's log to log, for the whole process, at debug level: controllers log what an
// operator needs to know themselves, once.
func Logs(log *slog.Logger) {
	klog.SetSlogLogger(slog.New(quiet{log.Handler()}))
}

// quiet makes everything debug.
type quiet struct{ slog.Handler }

func (q quiet) Enabled(ctx context.Context, _ slog.Level) bool {
	return q.Handler.Enabled(ctx, slog.LevelDebug)
}

func (q quiet) Handle(ctx context.Context, r slog.Record) error {
	r.Level = slog.LevelDebug
	r.Message = "client-go: " + strings.TrimSpace(r.Message)
	return q.Handler.Handle(ctx, r)
}

func (q quiet) WithAttrs(as []slog.Attr) slog.Handler { return quiet{q.Handler.WithAttrs(as)} }
func (q quiet) WithGroup(name string) slog.Handler    { return quiet{q.Handler.WithGroup(name)} }

// Once remembers what was logged, for a problem to be logged once and not at each retry. The zero
// value is ready for use.
type Once struct {
	mu   sync.Mutex
	said map[string]string
}

// New reports whether text is new for a subject, and remembers it; "" forgets the subject's.
func (o *Once) New(subject, text string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.said[subject] == text {
		return false
	}
	if o.said == nil {
		o.said = map[string]string{}
	}
	o.said[subject] = text
	if text == "" {
		delete(o.said, subject)
		return false
	}
	return true
}
