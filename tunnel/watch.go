package tunnel

import "culvert.dev/tunnel/internal/relay"

// A TunnelWatcher is a net.Conn that is told of the tunnel that it becomes an end of. The
// Relay does not close an Unwrapper: it closes what is inside. Its methods must not block.
type TunnelWatcher interface {
	// TunnelBegan is called once the Relay carries the tunnel, with what aborts the tunnel.
	// It may be called after TunnelEnded.
	TunnelBegan(kill func(why Reason))

	// TunnelEnded is called once, when both ends of the tunnel are closed.
	TunnelEnded(End)
}

// A watchedRecord is the record of a tunnel with TunnelWatchers.
type watchedRecord struct {
	record
	watchers []TunnelWatcher
}

// watched returns rec, or one that tells those of ends that are TunnelWatchers.
func watched(rec record, ends ...any) (record, []TunnelWatcher) {
	var all []TunnelWatcher
	for _, end := range ends {
		if w, ok := end.(TunnelWatcher); ok {
			all = append(all, w)
		}
	}
	if all == nil {
		return rec, nil
	}
	return &watchedRecord{rec, all}, all
}

// Ended implements relay.Owner.
func (rec *watchedRecord) Ended(e End) {
	rec.record.Ended(e)
	for _, w := range rec.watchers {
		w.TunnelEnded(e)
	}
}

// tellBegan tells watchers of the tunnel that t has begun.
func tellBegan(watchers []TunnelWatcher, t relay.Tunnel) {
	for _, w := range watchers {
		w.TunnelBegan(t.Kill)
	}
}
