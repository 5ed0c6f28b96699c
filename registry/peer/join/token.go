package join

import (
	"errors"
	"fmt"
	"time"

	"culvert.dev/internal/invitation"
	"culvert.dev/tunnel"
)

const maxZones = 64

// parseToken reads the token of a site. Its errors do not quote it.
func parseToken(text string, now time.Time) (*invitation.Token, error) {
	t, err := invitation.Parse(text, now)
	if err != nil {
		return nil, err
	}
	if t.Kind != invitation.Site {
		return nil, errors.New("the token is not for a site: it gives a device an identity")
	}
	if _, err := ParseZones(t.Zones); err != nil {
		return nil, errors.New("the token is malformed")
	}
	return t, nil
}

// CheckToken returns why no site can join by a token, before any connection is made.
func CheckToken(text string) error {
	_, err := parseToken(text, time.Now())
	return err
}

// ParseZones returns the names that a site may offer: "*.west.example".
func ParseZones(list []string) ([]tunnel.Pattern, error) {
	if len(list) > maxZones {
		return nil, fmt.Errorf("there are %d zones, limit %d", len(list), maxZones)
	}
	all := make([]tunnel.Pattern, len(list))
	for i, text := range list {
		p, err := tunnel.ParsePattern(text)
		if err != nil || p.Suffix.IsReserved() {
			return nil, fmt.Errorf("%q is not a zone: write it as \"*.west.example\"", clip(text))
		}
		all[i] = p
	}
	return all, nil
}

func clip(s string) string {
	const most = 120
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}
