package mux

import (
	"context"

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
	Extended connect.ExtendedService // for extended CONNECT; nil for a server that does not take it
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
	service, err := s.serviceOf(list)
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
		if err == nil && list.Protocol != "" {
			stream = s.Extended.NewStream(stream, fields)
		}
		return stream, err
	}
	req.Refuse = func(err error) { st.Refuse(service.Refusal(req, err)) }
	s.Handler.ServeTunnel(ctx, req)
	return nil
}

// serviceOf returns the Service that admits the request of list. With an error it is the
// Service that refuses it.
func (s *Server) serviceOf(list *connect.HeaderList) (connect.Service, error) {
	extended := list.Protocol != ""
	if extended && (s.Extended == nil || s.Extended.Name() != list.Protocol) {
		return s.Service, tunnel.Refusef(tunnel.Unsupported, "connect: extended CONNECT for %q", tunnel.Clip(list.Protocol))
	}
	if err := list.Check(); err != nil {
		return s.Service, err
	}
	if extended {
		return s.Extended, nil
	}
	return s.Service, nil
}
