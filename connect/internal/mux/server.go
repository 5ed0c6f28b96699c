package mux

import (
	"context"
	"slices"

	"culvert.dev/connect"
	"culvert.dev/tunnel"
)

// A PlainService is the Service of plain CONNECT.
type PlainService struct {
	connect.Protocol
	Proto string // what Name returns
}

// Name implements connect.Service.
func (p *PlainService) Name() string { return p.Proto }

// A Server has requests served, whichever version of HTTP they came by.
type Server struct {
	Service  connect.Service
	Extended []connect.ExtendedService // for extended CONNECT; none for a server that does not take it
	Handler  tunnel.Handler
}

// A RequestStream is the stream that a request came on.
type RequestStream interface {
	// Accept sends the 200 with fields. It gives the points of the request back.
	Accept(fields connect.Fields) (tunnel.Stream, error)

	// Refuse sends a refusal. It gives those points of the request back that a refusal
	// does not cost.
	Refuse(r connect.Refusal)
}

// Serve calls the Handler for the request of list, which came on st. It refuses a request
// that is not admitted and returns why: that one has not reached the Handler.
func (s *Server) Serve(ctx context.Context, req *tunnel.Request, list *connect.HeaderList, st RequestStream) error {
	service, extended, err := s.serviceOf(list)
	var fields connect.Fields
	if err == nil {
		req.Proto = service.Name()
		ctx, fields, err = service.AdmitList(ctx, req, list)
	}
	if err != nil {
		st.Refuse(service.Refusal(nil, err))
		return err
	}
	req.Accept = func() (tunnel.Stream, error) {
		stream, err := st.Accept(fields)
		if err == nil && extended != nil {
			stream = extended.NewStream(stream, fields)
		}
		return stream, err
	}
	req.Refuse = func(err error) { st.Refuse(service.Refusal(req, err)) }
	s.Handler.ServeTunnel(ctx, req)
	return nil
}

// serviceOf returns the Service that admits the request of list, and that as an
// ExtendedService where it is one. With an error it is the Service that refuses the
// request.
func (s *Server) serviceOf(list *connect.HeaderList) (connect.Service, connect.ExtendedService, error) {
	if list.Protocol == "" {
		return s.Service, nil, list.Check()
	}
	at := slices.IndexFunc(s.Extended, func(e connect.ExtendedService) bool { return e.Name() == list.Protocol })
	if at < 0 {
		return s.Service, nil, tunnel.Refusef(tunnel.Unsupported, "connect: extended CONNECT for %q", tunnel.Clip(list.Protocol))
	}
	if err := list.Check(); err != nil {
		return s.Service, nil, err
	}
	return s.Extended[at], s.Extended[at], nil
}
