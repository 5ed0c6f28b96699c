package h3

import (
	"testing"
	"time"

	"github.com/quic-go/quic-go"
)

// A connection is stuck where what it sends is not acknowledged, or is lost, for so
// long; not while it has little to send, nor where a part of it arrives.
func TestStuckPath(t *testing.T) {
	type look struct {
		at         float64 // seconds
		sent, lost uint64  // so far
		rtt        time.Duration
		received   uint64 // packets of the peer
	}
	for _, tt := range []struct {
		name  string
		looks []look
		want  float64 // when it is found to be stuck; 0 for never
	}{
		{"nothing is sent", []look{{5, 0, 0, 1, 0}, {100, 0, 0, 1, 0}, {200, 0, 0, 1, 0}}, 0},
		{"signs of life alone", []look{{5, 100, 0, 1, 0}, {10, 150, 0, 2, 0}, {20, 200, 0, 3, 0}, {60, 250, 0, 4, 0}}, 0},
		{"the search for the largest packet is lost", []look{{5, 4000, 0, 1, 0}, {10, 8000, 0, 1, 0}, {30, 8000, 0, 1, 0}, {60, 8000, 0, 1, 0}}, 0},
		{"and then something is sent", []look{{5, 8000, 0, 1, 0}, {10, 8000, 0, 1, 0}, {30, 40000, 0, 1, 0}, {35, 50000, 0, 2, 0}, {40, 60000, 0, 3, 0}}, 0},
		{"and something that is lost, much later", []look{{5, 8000, 0, 1, 0}, {10, 8000, 0, 1, 0}, {80, 8000, 0, 1, 0}, {85, 40000, 0, 1, 0}, {90, 50000, 0, 1, 0}, {101, 60000, 0, 1, 0}, {105, 60000, 0, 1, 0}}, 105},
		{"nothing is acknowledged", []look{{1, 20000, 0, 1, 0}, {5, 24000, 0, 1, 0}, {10, 26000, 0, 1, 0}, {15, 26000, 0, 1, 0}, {20, 28000, 0, 1, 0}, {25, 28000, 0, 1, 0}}, 25},
		{"one packet is sent again and again", []look{{5, 4000, 0, 1, 0}, {10, 5400, 0, 1, 0}, {15, 5400, 0, 1, 0}, {20, 6800, 0, 1, 0}, {25, 6800, 0, 1, 0}}, 25},
		{"signs of life are acknowledged, and all else is lost", []look{{5, 20000, 19000, 1, 0}, {10, 30000, 29000, 2, 0}, {20, 34000, 33000, 3, 0}, {25, 40000, 39000, 4, 0}}, 25},
		{"the peer is there, and repetitions are rare", []look{{5, 4000, 0, 1, 0}, {10, 4000, 0, 1, 1}, {15, 8000, 0, 1, 1}, {20, 8000, 0, 1, 2}, {25, 8000, 0, 1, 2}}, 25},
		{"nothing of the peer arrives", []look{{5, 4000, 0, 1, 0}, {10, 4000, 0, 1, 0}, {15, 8000, 0, 1, 0}, {20, 8000, 0, 1, 0}, {25, 8000, 0, 1, 0}}, 0},
		{"the search goes on, and the peer is there", []look{{5, 4000, 0, 1, 0}, {10, 8000, 0, 1, 1}, {15, 8000, 0, 1, 2}, {20, 8000, 0, 1, 3}, {30, 8000, 0, 1, 4}}, 0},
		{"half of it is lost", []look{{5, 20000, 10000, 1, 0}, {15, 60000, 30000, 2, 0}, {25, 99000, 50000, 3, 0}, {60, 200000, 100000, 4, 0}}, 0},
		{"a pause of twenty seconds", []look{{5, 20000, 0, 1, 0}, {10, 24000, 0, 1, 0}, {20, 26000, 0, 1, 0}, {22, 60000, 10000, 2, 0}, {60, 61000, 10000, 3, 0}}, 0},
	} {
		var w pathWatch
		w.stuck(quic.ConnectionStats{LatestRTT: 1}, 1)
		got := 0.0
		for _, l := range tt.looks {
			if w.stuck(quic.ConnectionStats{BytesSent: l.sent, BytesLost: l.lost, LatestRTT: l.rtt, PacketsReceived: l.received}, int64(l.at*float64(time.Second))) && got == 0 {
				got = l.at
			}
		}
		if got != tt.want {
			t.Errorf("%s: stuck at %v, want %v", tt.name, got, tt.want)
		}
	}
}
